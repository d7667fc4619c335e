"""A machine's NVRAM goes with its snapshots, and a fork has its own."""

import hashlib
from typing import Any

import pytest

from tests.lab.bench import Bench, until
from tests.lab.firmware import NVRAM, with_nvram
from tests.lab.snapshots import proofs, taken

SMALL: dict[str, Any] = {
    "memory": "192MiB", "dirty": "16MiB@1MiB/s", "disk": "32MiB", "disk_format": "qcow2",
}  # fmt: skip
FORKS = "/var/lib/libvirt/qemu/nvram/fork_VARS.fd"


def write(bench: Bench, text: str) -> None:
    """As firmware would; the guest is off."""
    command = f"printf '{text}' | dd of={NVRAM} conv=notrunc status=none"
    bench.inside("alpha", "sh", "-c", command)


def digest(bench: Bench, path: str, on: str = "alpha") -> str:
    return bench.inside(on, "sha256sum", path).split()[0]


def expected(text: str) -> str:
    content = b"first start ".ljust(128 << 10, b"\xff")
    return hashlib.sha256(text.encode() + content[len(text) :]).hexdigest()


@pytest.mark.long
def test_nvram_is_kept_and_comes_back(kept: Bench) -> None:
    kept.guest(**SMALL)
    with_nvram(kept)
    kept.inside("alpha", "virsh", "destroy", "web1")
    write(kept, "second")
    off = taken(kept, "--no-memory").json
    kept.inside("alpha", "virsh", "start", "web1")
    until(lambda: kept.seen().runs == 3, limit=60)
    live = taken(kept).json
    kept.inside("alpha", "virsh", "destroy", "web1")
    write(kept, "third!!!")

    back = kept.good("snapshot", "restore", off["id"], "--replace", "--json")
    assert back.json["images"]["nvram"] == NVRAM
    assert "NVRAM" not in back.err  # nothing is missing
    assert digest(kept, NVRAM) == expected("second")

    write(kept, "third!!!")
    kept.good("snapshot", "restore", live["id"], "--replace")
    assert digest(kept, NVRAM) == expected("second")
    assert proofs(kept) == []

    kept.good("snapshot", "restore", live["id"], "--as", "fork", "--on", "beta")
    try:
        assert FORKS in kept.inside("beta", "virsh", "dumpxml", "fork")
        assert digest(kept, FORKS, "beta") == expected("second")
    finally:
        kept.inside("beta", "virsh", "destroy", "fork")
        kept.inside("beta", "virsh", "undefine", "--nvram", "fork")
        for name in ("code.fd", "vars.fd", "web1.xml"):
            (kept.plan.shared / name).unlink(missing_ok=True)
        kept.inside(
            "alpha", "sh", "-c", f"virsh destroy web1; virsh undefine --nvram web1; rm -f {NVRAM}"
        )
