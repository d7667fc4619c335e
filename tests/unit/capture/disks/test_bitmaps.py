"""Whether a QEMU that is no root may open its images again."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vmckpt.capture.disks import bitmaps
from vmckpt.errors import CannotCapture
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.hypervisor.qmp import QmpMonitor

NOBODY = 65534
GUEST = "5c6f9c5e-9f35-4c39-8c66-0e6f4f8d7f10"
NODES: list[dict[str, Any]] = [
    {"node-name": "f0", "drv": "qcow2", "ro": False, "file": "/srv/a.qcow2"},
    {"node-name": "s0", "drv": "file", "ro": False, "file": "/srv/a.qcow2"},
    {"node-name": "s1", "drv": "file", "ro": True, "file": "/srv/base.qcow2"},
    {"node-name": "s2", "drv": "host_device", "ro": False, "file": "/dev/vg/b"},
    {"node-name": "s4", "drv": "file", "ro": False, "file": "/dev/fdset/2"},
    {"node-name": "s3", "drv": "nbd", "ro": False, "file": "nbd://beta:10809/x"},
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def process() -> Iterator[int]:
    """A process that is no root's, as QEMU is."""
    words = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    with subprocess.Popen([*words, "sleep", "60"]) as started:
        while (Path(f"/proc/{started.pid}/comm")).read_text() != "sleep\n":
            pass
        yield started.pid
        started.kill()


class Asked(QmpMonitor):
    """A guest whose QEMU has these nodes."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self.nodes = nodes

    guest, name, host = GUEST, "web1", "alpha"

    def ask(self, command: str, **arguments: object) -> Any:
        assert (command, arguments) == ("query-named-block-nodes", {"flat": True})
        return self.nodes


def test_what_is_written_to_on_the_host_counts() -> None:
    assert bitmaps.writable(NODES) == ["/dev/vg/b", "/srv/a.qcow2"]


@pytest.mark.parametrize(
    ("groups", "more"),
    [("", ["--clear-groups"]), ("107 64055 ", ["--groups", "107,64055"])],
)
def test_the_user_and_groups_of_a_process(groups: str, more: list[str]) -> None:
    status = (
        f"Name:\tqemu\nUid:\t0\t64055\t0\t0\nGid:\t1\t107\t1\t1\nGroups:\t{groups}\nNSpid:\t9\n"
    )
    assert bitmaps.as_it_runs(status) == ["--reuid", "64055", "--regid", "107", *more]


def test_root_may_open_all() -> None:
    status = "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t\n"
    assert bitmaps.as_it_runs(status) is None


def test_an_image_that_went_back_to_its_owner_is_told_before_the_guest_stands_still(
    folder: Path, process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "hold", lambda _guest: HeldProcess(process))
    image = folder / "a b\n.raw"
    image.touch(mode=0o600)
    nodes = [{"node-name": "s0", "drv": "file", "ro": False, "file": str(image)}]
    with pytest.raises(CannotCapture, match="no permission to reopen") as caught:
        bitmaps.require_reopen(Asked(nodes))
    assert str(image) in caught.value.message
    assert f"chown {NOBODY} " in (caught.value.hint or "")
    image.chmod(0o666)
    bitmaps.require_reopen(Asked(nodes))
    (folder).chmod(0o700)
    with pytest.raises(CannotCapture, match="no permission to reopen"):
        bitmaps.require_reopen(Asked(nodes))


def test_without_the_programs_for_it_nothing_is_refused(
    folder: Path, process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "hold", lambda _guest: HeldProcess(process))
    monkeypatch.setenv("PATH", str(folder))
    nodes = [{"node-name": "s0", "drv": "file", "ro": False, "file": "/root/x"}]
    bitmaps.require_reopen(Asked(nodes))
