"""What the source knows of its guest, from libvirt's and QEMU's answers."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import libvirt
import libvirt_qemu
import pytest
import pytest_asyncio

from tests.support import libvirt_host
from tests.support.libvirt_host import UUID
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import backup, block, migration_source
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.disk import Checkpoint

REASONS = ["virgl is not\n yet migratable", "x"]
DOMAIN = """<domain type='kvm'><name>web1</name><os><kernel>/boot/k</kernel></os><devices>
<disk type='file' device='disk'><source file='/srv/a.qcow2' index='1'/><target dev='vda'/></disk>
</devices></domain>"""
IMAGE = {"image": {"format-specific": {"type": "qcow2", "data": {"data-file": "/srv/a.data"}}}}
OURS = Checkpoint(name="vmckpt-a", parent=None, made_at=0)
THEIRS = Checkpoint(name="virtnbdbackup.0", parent=None, made_at=0)


@pytest_asyncio.fixture
async def alpha(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hypervisor]:
    """A host of libvirt's test driver; QEMU's monitor and checkpoints are answered here."""

    def monitor(_domain: object, command: str, _flags: int) -> str:
        assert json.loads(command)["execute"] == "query-migrate"
        return json.dumps({"return": {"blocked-reasons": REASONS}})

    monkeypatch.setattr(libvirt_qemu, "qemuMonitorCommand", monitor)
    monkeypatch.setattr(libvirt.virDomain, "XMLDesc", lambda *_: DOMAIN)
    monkeypatch.setattr(block, "nodes", lambda _domain: {"libvirt-1-format": IMAGE})
    monkeypatch.setattr(backup, "list_checkpoints", lambda _domain: (OURS, THEIRS))
    async with Hypervisor(libvirt_host.host(tmp_path)) as found:
        yield found


async def test_the_source_tells_what_the_guest_needs_and_what_holds_it_back(
    alpha: Hypervisor,
) -> None:
    found = await migration_source.ask_source(alpha, UUID)

    assert [one.name for one in found.needs] == ["/boot/k"]
    assert found.blocked == ("virgl is not yet migratable", "x")
    assert found.data_files == {"vda": "/srv/a.data"}
    assert found.checkpoints == (THEIRS,)
    assert found.volumes == {}


async def test_a_qemu_that_gives_no_reasons_holds_nothing_back(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libvirt_qemu, "qemuMonitorCommand", lambda *_: '{"return": {}}')

    assert (await migration_source.ask_source(alpha, UUID)).blocked == ()


async def test_over_a_read_only_connection_qemu_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("QEMU was asked")

    monkeypatch.setattr(libvirt_qemu, "qemuMonitorCommand", refuse)
    monkeypatch.setattr(libvirt.virDomain, "XMLDesc", lambda *_: DOMAIN)
    monkeypatch.setattr(backup, "list_checkpoints", lambda _domain: ())
    async with Hypervisor(libvirt_host.host(tmp_path, read_only=True)) as alpha:
        found = await migration_source.ask_source(alpha, UUID)

    assert (found.blocked, found.data_files) == ((), {})


async def test_a_guest_that_is_gone_is_an_error(alpha: Hypervisor) -> None:
    with pytest.raises(HypervisorError):
        await migration_source.ask_source(alpha, UUID.replace("1", "2"))
