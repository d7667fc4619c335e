"""What QEMU opens while vmckpt works, compared with the profile that AppArmor would enforce.

No kernel here enforces a profile. The kernel reports what each QEMU opens (fanotify); the profile
is the one that libvirt generates for the guest, with the rules that docs/security.md adds.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.lab.bench import Bench
from tests.lab.snapshots import SMALL
from tests.support import apparmor
from tests.support.paths import ROOT
from vmckpt_lab import host

pytestmark = pytest.mark.long
HELPER = "/usr/lib/libvirt/virt-aa-helper"
PROFILES = [Path("/etc/apparmor.d"), ROOT / ".tools/etc/apparmor.d"]
OURS = ROOT / "packaging/apparmor/vmckpt"
LABELLED = [r"/.*/agent/scratch/vmckpt-[^/]*\.scratch$"]
"""Files for which libvirt adds a rule while it prepares a backup: its scratch files."""


@dataclass
class Recorder:
    """What the QEMU processes of the hosts have opened so far."""

    opened: dict[tuple[str, str], bool] = field(default_factory=dict)
    """By guest and path: whether the file was open for writing."""
    profiles: dict[str, list[apparmor.Rule]] = field(default_factory=dict)

    def read(self, lines: Iterator[str]) -> None:
        for line in lines:
            told = json.loads(line)
            key = (told["guest"], told["path"])
            self.opened[key] = self.opened.get(key, False) or told["writes"]

    def profile(self, bench: Bench, on: str, guest: str) -> None:
        """Add the rules that libvirt would generate for a guest as it is now."""
        xml = bench.inside(on, "virsh", "dumpxml", guest)
        uuid = re.search(r"<uuid>(.*)</uuid>", xml)
        assert uuid is not None
        done = subprocess.run(
            host.enter(bench.plan.host(on), HELPER, "-c", "-d", "-u", f"libvirt-{uuid[1]}"),
            input=xml, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        known = self.profiles.setdefault(guest, [])
        known += apparmor.rules(done.stderr.splitlines())  # of a dry run


@pytest.fixture
def recorder(kept: Bench) -> Iterator[Recorder]:
    found, processes, threads = Recorder(), [], []
    for one in kept.plan.hosts:
        program = ROOT / "tests/support/record_opens.py"
        process = subprocess.Popen(
            host.enter(one, sys.executable, str(program)), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        threads.append(threading.Thread(target=found.read, args=(process.stdout,)))
        threads[-1].start()
        processes.append(process)
    yield found
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    for thread, process in zip(threads, processes, strict=True):
        thread.join()
        assert process.stdout is not None
        process.stdout.close()


def test_no_file_that_qemu_opens_lacks_a_rule(kept: Bench, recorder: Recorder) -> None:
    kept.guest(**SMALL)
    kept.guest("db1", disk_format="qcow2", **SMALL)
    for guest in ("web1", "db1"):
        recorder.profile(kept, "alpha", guest)
    for words in (
        ("migrate", "web1", "--to", "beta"),
        ("migrate", "web1", "--to", "alpha", "--mode", "postcopy"),
        ("snapshot", "create", "web1", "--name", "one"),
        ("snapshot", "create", "web1", "--name", "two", "--way", "background"),
        ("snapshot", "create", "web1", "--name", "three", "--no-memory"),
        ("snapshot", "restore", "one", "--replace"),
        ("snapshot", "create", "db1", "--name", "four"),
        ("snapshot", "restore", "four", "--replace", "--lazy"),
        ("snapshot", "restore", "four", "--as", "fork1"),
        ("migrate", "web1", "--to", "beta", "--mode", "checkpoint"),
        ("migrate", "web1", "--to", "alpha", "--copy-storage", "full"),
        ("protect", "web1", "--to", "beta", "--failover", "manual"),
        ("failover", "web1", "--test"),
        ("failover", "web1", "--planned"),
        ("migrate", "web1", "--to", "alpha", "--copy-storage", "full"),
    ):
        kept.good(*words)
        for one in kept.plan.hosts:
            for guest in kept.inside(one.name, "virsh", "list", "--name").split():
                recorder.profile(kept, one.name, guest)

    general = apparmor.rules(
        [*apparmor.lines(PROFILES[0] / "abstractions/libvirt-qemu", PROFILES),
         *OURS.read_text().splitlines()]
    )  # fmt: skip
    assert {guest for guest, _ in recorder.opened} == {"web1", "db1", "fork1", "web1-test"}
    missing = {
        f"{guest}: {path} {'rw' if writes else 'r'}"
        for (guest, path), writes in recorder.opened.items()
        if not any(re.match(each, path) for each in LABELLED)
        and not apparmor.permits(
            [*general, *recorder.profiles.get(guest, [])], path, "rw" if writes else "r"
        )
    }
    assert missing == set()
