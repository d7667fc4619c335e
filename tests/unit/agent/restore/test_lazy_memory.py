"""Which memory can be restored lazily, and what QEMU already has of it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.agent.restore import lazy_memory
from vmckpt.agent.restore.lazy_memory import CannotServe
from vmckpt.capture.memory import marked_blocks
from vmckpt.capture.memory.marked_blocks import Mark, MarkedBlock
from vmckpt.hypervisor.qemu_process import userfaultfd


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ("", None),
        ("<memoryBacking><source type='memfd'/></memoryBacking>", None),
        ("<memoryBacking><hugepages/></memoryBacking>", "huge pages"),
        ("<devices><interface type='vhostuser'/></devices>", "writes the guest's memory"),
        ("<devices><hostdev type='pci'/></devices>", "writes the guest's memory"),
    ],
)
def test_what_prevents_a_lazy_restore_of_memory(inside: str, why: str | None) -> None:
    found = lazy_memory.obstacle(f"<domain>{inside}</domain>")
    assert (found is None) == (why is None)
    assert why is None or why in str(found)


@pytest.fixture(params=["private", "shared"])
def process(request: pytest.FixtureRequest) -> Iterator[WrittenProcess]:
    with WrittenProcess(shared=request.param == "shared") as made:
        yield made


def block(process: WrittenProcess) -> MarkedBlock:
    with Path(f"/proc/{process.held.pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(process.range.start)
        memory.write(b"m" * 4096)
    mark = Mark("pc.ram", b"m" * 4096, process.range.size)
    return marked_blocks.find(process.held, [mark])["pc.ram"]


def test_pages_that_exist_are_not_served(process: WrittenProcess) -> None:
    process.write([5, 6, 100])
    number = userfaultfd.create_inside(process.held)
    there = lazy_memory._registered(process.held, number, {"pc.ram": block(process)})
    # The mark, one page that was filled as a test, and the pages that were written.
    assert np.flatnonzero(there["pc.ram"]).tolist() == [0, 1, 5, 6, 100]


def test_memory_that_was_allocated_in_advance_is_refused() -> None:
    """Such pages are holes for lseek(2), and yet no access to them waits."""
    with WrittenProcess(shared=True) as process:
        process.allocate([200])
        number = userfaultfd.create_inside(process.held)
        with pytest.raises(CannotServe, match="allocated in advance"):
            lazy_memory._registered(process.held, number, {"pc.ram": block(process)})
