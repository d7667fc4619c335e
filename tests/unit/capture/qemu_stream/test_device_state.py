"""The device state of a real QEMU, without its memory, makes another one go on."""

import os

import numpy as np
import pytest

from tests.support.scratch_qemu import SIZE, Scratch
from vmckpt.capture.memory import ram_blocks
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.capture.memory.process_memory import ProcessMemory
from vmckpt.capture.qemu_stream import device_state
from vmckpt.capture.qemu_stream.device_state import StateFile
from vmckpt.capture.qemu_stream.header import parse_head
from vmckpt.errors import CaptureFailed
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

BIOS = 64 << 10


def filled(content: np.ndarray) -> Mapping:
    """A file with these pages, mapped."""
    file = os.memfd_create("block")
    os.ftruncate(file, content.nbytes)
    made = Mapping(file, content.nbytes, write=True)
    os.close(file)
    made.pages[:] = content
    return made


def load(standby: Scratch, state: bytes) -> None:
    file = os.memfd_create("state")
    os.write(file, state)
    os.lseek(file, 0, os.SEEK_SET)
    standby.tell("getfd", {"fdname": "state"}, files=(file,))
    os.close(file)
    standby.tell("migrate-incoming", {"uri": "fd:state"})
    while standby.run_state() == "inmigrate":
        pass
    assert standby.ask("query-migrate")["status"] == "completed"


@pytest.mark.parametrize("private", [True, False])
def test_a_standby_goes_on_from_it(private: bool) -> None:
    with (
        Scratch(accelerator="tcg", private=private) as guest,
        Scratch(accelerator="tcg", waits=True) as standby,
        HeldProcess(guest.pid) as held,
    ):
        found = ram_blocks.find(guest, held)
        assert device_state.is_possible(guest)
        blocks = [(one.name, one.range.size) for one in found.private]
        head = device_state.head_of(guest, blocks)
        memory = ProcessMemory(held, [one.range for one in (*found.guest, *found.private)])
        ram, state = np.zeros(0, dtype=np.uint64), b""
        for _ in range(3):  # as often as there are epochs
            with StateFile(guest, head) as file:
                guest.tell("stop", {})
                file.save()
                assert guest.run_state() == "paused"
                ram = memory.read(0, np.array([[0, SIZE >> 12]])).copy()
                guest.tell("cont", {})
                state = file.state()
        assert guest.ask("query-fdsets") == []
        there = [
            filled(memory.read(number, np.array([[0, size >> 12]])))
            for number, (_, size) in enumerate(blocks, 1)
        ]
        standby.memory.pages[:] = ram
        before = standby.count()
        load(standby, device_state.with_pages(state, there))
        assert standby.run_state() == "paused"
        assert standby.count() == before
        standby.tell("cont", {})
        assert standby.goes_on()
        for one in there:
            one.close()


def test_it_lists_the_blocks_whose_pages_are_added() -> None:
    with Scratch(accelerator="tcg") as guest:
        head = device_state.head_of(guest, [("pc.bios", BIOS)])
        guest.tell("stop", {})
        with StateFile(guest, head) as file:
            with pytest.raises(CaptureFailed, match="wrote no complete device state"):
                file.state()
            file.save()
            state = file.state()
    told, _ = parse_head(state)
    assert [(one.name, one.size) for one in told.blocks] == [("pc.bios", BIOS)]
    assert told.machine is not None
    assert told.machine.startswith("pc-i440fx-")
    with pytest.raises(CaptureFailed, match="are not those of the standby"):
        device_state.with_pages(state, [])


def test_what_a_killed_process_left_in_qemu_is_removed() -> None:
    with Scratch(accelerator="tcg") as guest:
        head = device_state.head_of(guest, [("pc.bios", BIOS)])
        StateFile(guest, head).__enter__()
        other = os.memfd_create("other")
        guest.tell("add-fd", {"opaque": "another tool's"}, files=(other,))
        os.close(other)
        assert len(guest.ask("query-fdsets")) == 2
        device_state.clean(guest)
        (left,) = guest.ask("query-fdsets")
        assert left["fds"][0]["opaque"] == "another tool's"
