"""libvirt's own memory snapshot: how it is asked for, and the image that its file becomes."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.support.migrating import Qemu
from tests.support.streams import SHORT_STREAM, parsed
from vmckpt.capture.memory import libvirt_save
from vmckpt.capture.memory.background_snapshot import Hooks
from vmckpt.capture.qemu_stream import save_image
from vmckpt.errors import CannotCapture, HypervisorError, StreamDamaged

HOOKS = Hooks(note=lambda _: None)
XML = """<domain><devices><disk><target dev='vda'/></disk><disk><target dev='sd&amp;a'/></disk>
<interface><target dev='vnet0'/></interface></devices></domain>"""


class Libvirt(Qemu):
    """Writes the file that it is asked for, or says that it cannot."""

    fails = False

    def xml(self) -> str:
        return XML

    def ask(self, command: str, **more: object) -> Any:
        if command in ("query-commands", "query-block"):
            return []
        return super().ask(command, **more)

    def save_memory_live(self, xml: str) -> None:
        if self.fails:
            raise HypervisorError("alpha: no room", host="alpha")
        memory = ET.fromstring(xml).find("memory")
        assert memory is not None
        header = save_image.header("<domain/>", running=True)
        Path(memory.get("file", "")).write_bytes(header + SHORT_STREAM)

    def abort_job(self) -> None: ...


def test_memory_goes_to_a_file_and_no_disk_is_touched() -> None:
    names = libvirt_save.disks(XML)
    assert names == ["vda", "sd&a"]
    told = ET.fromstring(libvirt_save.request(Path("/run/a'&b"), names))
    memory = told.find("memory")
    assert memory is not None
    assert memory.attrib == {"snapshot": "external", "file": "/run/a'&b"}
    assert [(one.get("name"), one.get("snapshot")) for one in told.iter("disk")] == [
        ("vda", "no"), ("sd&a", "no")
    ]  # fmt: skip


def test_the_image_is_what_libvirt_wrote_and_its_file_is_gone(tmp_path: Path) -> None:
    found = libvirt_save.capture(Libvirt(), tmp_path / "image", HOOKS)
    sent = parsed(SHORT_STREAM)
    assert (found.image.head, found.image.tail()) == (sent.head, sent.tail_bytes)
    assert not (tmp_path / "image" / "saved").exists()


def test_disks_are_opened_while_the_guest_stands_still(tmp_path: Path) -> None:
    libvirt, states = Libvirt(), list[str]()
    hooks = Hooks(note=lambda _: None, barrier=lambda: states.append(libvirt.state))
    found = libvirt_save.capture(libvirt, tmp_path / "image", hooks)
    assert (states, libvirt.state) == (["paused"], "running")
    assert found.pause > 0


def test_one_that_libvirt_refuses_leaves_nothing(tmp_path: Path) -> None:
    libvirt = Libvirt()
    libvirt.fails = True
    with pytest.raises(HypervisorError, match="no room"):
        libvirt_save.capture(libvirt, tmp_path / "image", HOOKS)
    assert (libvirt.state, list(tmp_path.iterdir())) == ("running", [])


def test_a_guest_that_stands_still_is_not_captured_so(tmp_path: Path) -> None:
    with pytest.raises(CannotCapture, match="is not running"):
        libvirt_save.capture(Libvirt(state="paused"), tmp_path / "image", HOOKS)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_becomes_no_image(tmp_path: Path) -> None:
    folder = tmp_path / "image"
    folder.mkdir()
    header = save_image.header("<domain/>", running=True)
    (folder / "saved").write_bytes(header + SHORT_STREAM[:1000])
    with pytest.raises(StreamDamaged):
        libvirt_save.take_apart(folder / "saved", folder, HOOKS)
    assert not folder.exists()
