"""Disks of a guest that is off, served by programs of their own."""

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from vmckpt.capture.disks.offline import OffDisks
from vmckpt.hypervisor.backup import Backups
from vmckpt.model.disk import DiskFacts

_LATE = """
import socket, sys, time
served = socket.socket(socket.AF_UNIX)
served.bind(sys.argv[1])
time.sleep(0.5)
served.listen()
time.sleep(60)
"""


def test_a_disk_is_there_when_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """qemu-nbd gives its socket a name before it listens, on a busy host long before."""
    image = tmp_path / "a.raw"
    image.write_bytes(b"x" * 65536)
    disk = DiskFacts(name="vda", kind="file", device="disk", format="raw", source=str(image))
    backups = cast("Backups", SimpleNamespace(facts=lambda: (disk,)))
    with OffDisks(backups, guest="u-1", host="alpha", snapshot="s-1", folder=tmp_path) as disks:
        place = str(disks._socket("vda"))
        monkeypatch.setattr(
            disks, "_serve", lambda *_: subprocess.Popen([sys.executable, "-c", _LATE, place])
        )
        disks.prepare(None)
        disks.freeze_point()
        with socket.socket(socket.AF_UNIX) as reader:
            reader.connect(place)
