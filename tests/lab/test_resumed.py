"""A Debian guest and its forks after a restore: clock, keys, random numbers, identity."""

import base64
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench import Bench
from tests.support.paths import ROOT
from vmckpt_lab.debian import guest as debian

pytestmark = pytest.mark.long

HOOK = ROOT / "packaging" / "guest" / "50-identity"
PLACE = "/etc/vmckpt/resumed.d/50-identity"


def agent(bench: Bench, guest: str, command: str, **arguments: object) -> Any:
    text = json.dumps({"execute": command, "arguments": arguments})
    told = json.loads(bench.inside("alpha", "virsh", "qemu-agent-command", guest, text))
    return told["return"]


def inside(bench: Bench, guest: str, script: str, given: bytes = b"") -> str:
    """Run a script in the guest, with this input. Its output."""
    more = {"input-data": base64.b64encode(given).decode()}
    words = {"path": "/bin/sh", "arg": ["-c", script], "capture-output": True, **more}
    started = agent(bench, guest, "guest-exec", **words)
    done: dict[str, Any] = {"exited": False}
    while not done["exited"]:
        done = agent(bench, guest, "guest-exec-status", pid=started["pid"])
        time.sleep(0.1)
    said = base64.b64decode(done.get("out-data", "")).decode()
    assert done.get("exitcode") == 0, (said, base64.b64decode(done.get("err-data", "")))
    return said.strip()


def behind(bench: Bench, guest: str) -> float:
    """How many seconds the guest's clock is behind the host's."""
    return time.time() - int(agent(bench, guest, "guest-get-time")) / 1e9


def certificate(folder: Path) -> bytes:
    """A certificate that is valid from now on."""
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    words += ["-subj", "/CN=now", "-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    subprocess.run(words, check=True, capture_output=True)
    return (folder / "cert").read_bytes()


IDENTITY = """cat /etc/machine-id; hostname; cat /etc/ssh/ssh_host_ed25519_key.pub
od -An -tx1 -N16 /dev/urandom"""


def test_a_guest_and_its_forks_are_sane_after_a_restore(kept: Bench, tmp_path: Path) -> None:
    debian.start(kept.plan, "db1", "alpha")
    put = f"mkdir -p {Path(PLACE).parent} && cat >{PLACE} && chmod 755 {PLACE}"
    inside(kept, "db1", put, HOOK.read_bytes())
    before = inside(kept, "db1", IDENTITY).splitlines()
    taken = kept.good("snapshot", "create", "db1", "--json").json["id"]
    time.sleep(20)
    back = kept.good("snapshot", "restore", taken, "--replace", "--lazy", "--json").json
    assert back["clock_not_set"] == ""
    assert [one for one in back["warnings"] if "base image" not in one] == []
    assert behind(kept, "db1") < 3
    check = "cat >/tmp/cert; openssl verify -CAfile /tmp/cert /tmp/cert"
    assert inside(kept, "db1", check, certificate(tmp_path)).endswith("OK")
    after = inside(kept, "db1", IDENTITY).splitlines()
    assert after[:3] == before[:3], "a restored guest keeps its identity"
    kept.inside("alpha", "virsh", "suspend", "db1")  # the machine has two cores

    found = [after]
    for name in ("one", "two"):
        fork = kept.good("snapshot", "restore", taken, "--as", name, "--json").json
        assert fork["clock_not_set"] == ""
        assert not [one for one in fork["warnings"] if "hooks" in one]
        assert behind(kept, name) < 3
        found.append(inside(kept, name, IDENTITY).splitlines())
        kept.inside("alpha", "virsh", "destroy", name)
    assert [one[1] for one in found] == ["lab", "one", "two"]
    for each in zip(*found, strict=True):
        assert len(set(each)) == 3, each
