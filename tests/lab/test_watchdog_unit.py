"""The watchdog as a unit of a real systemd, which has a process namespace and a cgroup of its own.

Lab hosts have no systemd. Here it runs with no units but those that it is asked for.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.lab.bench import until
from tests.support.paths import ROOT

pytestmark = pytest.mark.long

# $1: the cgroup's name. cgroup2 is mounted anew, since it may be anywhere, or nowhere.
_BEGIN = """\
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/all /run/lock /run/units
mount -t cgroup2 cgroup2 /run/all
mkdir "/run/all/$1"
echo $$ >"/run/all/$1/cgroup.procs"
umount /run/all
for unit in default basic sysinit shutdown; do
    printf '[Unit]\\nDefaultDependencies=no\\n' >/run/units/$unit.target
done
export SYSTEMD_UNIT_PATH=/run/units container=lxc
exec unshare --cgroup --pid --fork --uts --ipc --kill-child --mount-proc sh -euc '
    mount -t tmpfs tmpfs /dev/shm
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    exec /lib/systemd/systemd --system --unit=default.target --log-target=console'
"""
_END = """\
set -eu
mount --make-rprivate /
mount -t cgroup2 cgroup2 /mnt
find "/mnt/$1" -depth -type d -exec rmdir {} +
"""


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[int]:
    """Its process."""
    name = f"vmckpt-test-{os.getpid()}"
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", _BEGIN, "sh", name], stdout=log, stderr=log,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        until(lambda: _ready(running.pid) is not None)
        process = _ready(running.pid)
        assert process is not None
        yield process
    finally:
        running.kill()  # and its process 1, and all in its namespace with it
        running.wait()
        time.sleep(0.2)
        subprocess.run(["unshare", "--mount", "sh", "-c", _END, "sh", name], check=True)
    sys.stderr.write((tmp_path / "log").read_text())


def _ready(process: int) -> int | None:
    """Process 1 of the namespace, once it can be asked for units."""
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        seen = Path("/proc") / child
        with suppress(OSError):  # it was a program of the script's
            name = (seen / "comm").read_text()
            if name == "systemd\n" and (seen / "root/run/systemd/private").exists():
                return int(child)
    return None


def test_systemd_starts_it_again_whatever_is_killed_and_leaves_its_agents_alone(
    systemd: int,
) -> None:
    inside = ["nsenter", "-t", str(systemd), "-m", "-p", "-u", "-i", "-C", "--"]
    story = ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), sys.executable, "-m"]
    done = subprocess.run(
        [*inside, *story, "tests.lab.systemd_inside", "/dev/shm/watchdog"], capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    late = told.pop("late_s")
    assert told == {
        "available": True, "cgroup": True, "agents": 1, "agent_lives": True,
        "agent_outlives_it": True,
    }  # fmt: skip
    assert 0.0 <= late < 0.25
