"""A waiting QEMU gets the DIMMs that were plugged into the guest, and their memory is mapped."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest

from tests.support.scratch_qemu import SIZE, Scratch
from vmckpt.capture.memory import memory_files
from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import standby_domain
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.replication.backup.standby import Standby
from vmckpt.replication.protocol.memory_layout import Dimm, Layout
from vmckpt.units import Bytes

ROM = ("pc.rom", 4096)
DIMMS = tuple(
    Dimm(name=f"dimm{number}", size=64 << 20, node=0, slot=number, address=(4 << 30) + at)
    for number, at in enumerate((0, 64 << 20))
)
FIRST = (("pc.ram", SIZE), ROM)
BOTH = (("memdimm0", 64 << 20), ("memdimm1", 64 << 20), *FIRST)


class Waiting(Scratch):
    """QEMU, and what libvirt does with it."""

    def described(self) -> str:
        return "<domain/>"

    def plug(self, xml: str) -> None:
        """As libvirt does, which names it by its slot."""
        device = ET.fromstring(xml)
        place, size = device.find("address"), device.findtext("target/size")
        assert place is not None
        assert device.find("target/node") is None
        name = f"dimm{place.get('slot')}"
        backend = {"qom-type": "memory-backend-memfd", "id": f"mem{name}", "share": True}
        self.tell("object-add", {**backend, "size": int(size or 0)})
        where = {"slot": int(place.get("slot", "")), "addr": int(place.get("base", ""), 16)}
        self.tell("device_add", {"driver": "pc-dimm", "id": name, "memdev": f"mem{name}", **where})


@pytest.fixture
def qemu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    with Waiting(accelerator="tcg", waits=True, more=("-m", "slots=4,maxmem=1G")) as made:

        @contextmanager
        def require(*_: object) -> Iterator[HeldProcess]:
            with HeldProcess(made.pid) as held:
                yield held

        monkeypatch.setattr(identity, "require", require)
        monkeypatch.setattr(standby_domain, "plug", lambda qemu, xml: qemu.plug(xml))
        yield made


@pytest.fixture
def standby(qemu: Waiting, tmp_path: Path) -> Iterator[Standby]:
    with Standby(cast("Any", qemu), (), tmp_path, (0, 0), private=[ROM]) as made:
        yield made


def test_dimms_are_plugged_in_and_each_has_memory_of_its_own(
    qemu: Waiting, standby: Standby
) -> None:
    before = standby.memory
    before[0].pages[5] = 5
    assert not standby.fit(Layout(blocks=FIRST))
    assert standby.fit(Layout(blocks=BOTH, dimms=DIMMS))
    assert [one.size for one in standby.memory] == [size for _, size in BOTH]
    assert standby.memory[2:] == before
    for number, one in enumerate(standby.memory[:2]):
        assert not one.pages[:16].any()
        one.pages[0] = number + 7
        at = DIMMS[number].address
        told = qemu.ask("human-monitor-command", **{"command-line": f"xp /1xb {at:#x}"})
        assert int(told.split()[-1], 16) == number + 7
    # Asked again, as by an agent that has just started: nothing changes.
    assert not standby.fit(Layout(blocks=BOTH, dimms=DIMMS))
    assert standby.memory[0].pages[0, 0] == 7
    assert qemu.run_state() == "inmigrate"


def test_a_later_agent_finds_the_dimms_at_their_numbers(
    qemu: Waiting, standby: Standby, tmp_path: Path
) -> None:
    standby.fit(Layout(blocks=BOTH, dimms=DIMMS))
    standby.memory[1].pages[3] = 3
    with Standby(cast("Any", qemu), (), tmp_path, (0, 0), private=[ROM]) as later:
        assert not later.fit(Layout(blocks=BOTH))
        assert later.memory[1].pages[3].tolist() == [3] * 512


def test_other_memory_than_the_guest_s_is_refused(standby: Standby) -> None:
    for blocks in (BOTH, FIRST[:1], (FIRST[1], FIRST[0])):
        with pytest.raises(HypervisorError, match="scratch guest on here: the standby"):
            standby.fit(Layout(blocks=blocks))
    assert not standby.fit(Layout(blocks=FIRST))


def test_without_room_nothing_is_plugged_in(
    qemu: Waiting, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_files, "available", lambda: Bytes(500 << 20))
    with pytest.raises(BadInput, match=r"here has 500 MiB of free memory; .* needs 576 MiB"):
        standby.fit(Layout(blocks=BOTH, dimms=DIMMS))
    assert qemu.ask("query-memory-devices") == []
