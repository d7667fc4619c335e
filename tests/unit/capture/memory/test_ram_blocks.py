"""Where the memory of a real QEMU is in its address space."""

import numpy as np
import pytest

from tests.support.scratch_qemu import PAGES, SIZE, Scratch
from vmckpt.capture.memory import ram_blocks
from vmckpt.capture.memory.process_memory import ProcessMemory
from vmckpt.capture.memory.ram_blocks import Region
from vmckpt.capture.memory.write_tracking import CannotTrack, MemoryRange, Why
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt_lab.machine_speed import Deadline

COUNTED = np.array([[16, 16 + PAGES]])
RAMBLOCK_7 = """\
              Block Name    PSize              Offset               Used              Total
                  pc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000
   0000:00:02.0/vga.vram    4 KiB  0x00000000040a0000 0x0000000001000000 0x0000000001000000
"""
RAMBLOCK_9 = """\
      Block Name    PSize              Offset               Used              Total         HVA  RO
  pc.ram  4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000 0x00007f0b2be00000  rw
 pc.bios  4 KiB  0x0000000004060000 0x0000000000040000 0x0000000000040000 0x00007f0bfc000000  ro
"""
MTREE = """\
FlatView #0
 AS "memory", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
  00000000000c0000-00000000000cafff (prio 0, rom): pc.ram @00000000000c0000
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
  00000000fffc0000-00000000ffffffff (prio 0, romd): pc.bios

FlatView #1
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
"""


@pytest.mark.parametrize("more", [(), ("-device", "VGA", "-device", "virtio-net-pci")])
def test_the_blocks_of_a_guest_with_private_memory(more: tuple[str, ...]) -> None:
    with Scratch(accelerator="tcg", private=True, more=more) as guest, HeldProcess(
        guest.pid
    ) as held:  # fmt: skip
        if more:  # its program never enables the card
            with pytest.raises(CannotTrack, match=r"not known \(.*vga.vram\)") as caught:
                ram_blocks.find(guest, held)
            assert caught.value.why is Why.NOT_FOUND
            return
        found = ram_blocks.find(guest, held)
        assert [(one.name, one.range.size) for one in found.guest] == [("pc.ram", SIZE)]
        # The program never hides the legacy ROMs, as firmware does.
        assert [one.name for one in found.private] == ["pc.rom", "pc.bios"]
        memory = ProcessMemory(held, [one.range for one in (*found.guest, *found.private)])
        until = Deadline(20)
        while np.count_nonzero(memory.read(0, COUNTED).any(axis=1)) < PAGES:
            assert not until.passed()
        assert memory.read(2, np.array([[0, 1]])).tobytes()[:2] == b"\xfa\x31"


def test_each_block_is_listed_with_its_size() -> None:
    assert ram_blocks.blocks(RAMBLOCK_7) == {
        "pc.ram": 64 << 20, "0000:00:02.0/vga.vram": 16 << 20
    }  # fmt: skip
    assert ram_blocks.blocks(RAMBLOCK_9) == {"pc.ram": 64 << 20, "pc.bios": 256 << 10}
    assert ram_blocks.blocks("") == {}


def test_what_the_guest_sees_of_a_block() -> None:
    seen = ram_blocks.regions(MTREE)
    assert seen == (
        Region("pc.ram", 0, 0), Region("pc.ram", 0xC0000, 0xC0000),
        Region("vga.vram", 0xFD000000, 0), Region("pc.bios", 0xFFFC0000, 0),
    )  # fmt: skip
    assert ram_blocks.matching("0000:00:02.0/vga.vram", seen) == [seen[2]]
    assert ram_blocks.matching("ga.vram", seen) == []


@pytest.mark.parametrize(
    ("start", "size", "there"),
    [
        (0x1000, 0x2000, True), (0x2000, 0x1000, True), (0x1000, 0x3000, False),
        (0x5000, 0x1000, False), (0x1001, 0x1000, False), (0x1000, 0, False), (0x0, 0x1000, False),
    ],
)  # fmt: skip
def test_only_memory_that_qemu_can_write_counts(start: int, size: int, there: bool) -> None:
    maps = "1000-3000 rw-p 00000000 00:00 0\n5000-6000 r--p 00000000 00:00 0 [x]\n"
    assert ram_blocks.is_mapped(maps, MemoryRange(start, size)) is there
