"""What a checkpoint of QEMU's COLO stream comes to: changed pages, and device state."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.colo_streams import FIRST, HEAD, STATE, TAIL, checkpoint, pages, word
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.capture.qemu_stream.header import EOF, PAGE
from vmckpt.capture.qemu_stream.stream import StreamWriter
from vmckpt.errors import CannotCapture
from vmckpt.replication.dirty_pages import colo_parser
from vmckpt.replication.dirty_pages.colo_parser import ColoParser
from vmckpt.replication.dirty_pages.colo_state import Gathered, paused, without_description
from vmckpt.replication.dirty_pages.finder import Changed


def test_the_state_of_a_first_pass_is_that_of_a_checkpoint_but_for_its_description() -> None:
    assert without_description(TAIL) == STATE
    assert without_description(STATE) == STATE


def test_a_guest_that_was_noted_as_running_is_noted_as_paused() -> None:
    noted = b"\x0bglobalstate" + bytes(4) + word(1)
    running = noted + word(8) + b"running".ljust(100, b"\0") + STATE

    assert paused(running) == noted + word(7) + b"paused".ljust(100, b"\0") + STATE
    assert paused(STATE) == STATE
    assert paused(running * 2) == running * 2


@pytest.fixture
def last() -> Iterator[Mapping]:
    file = os.memfd_create("last")
    os.ftruncate(file, 16 * PAGE)
    with Mapping(file, 16 * PAGE, write=True) as mapping:
        os.close(file)
        yield mapping


def gathered(last: Mapping, *, most: int = 100) -> tuple[Gathered, ColoParser]:
    """What a conversation comes to, after its first pass."""
    files = [MemoryFile(("pc.ram", "/objects/pc.ram"), 16 * PAGE, Path("/nowhere"))]
    sink = Gathered(files, [last], most=most)
    parser = ColoParser(sink)
    parser.feed(FIRST)
    parser.ready()
    return sink, parser


def test_of_the_first_pass_only_what_differs_from_the_last_copy_counts(last: Mapping) -> None:
    last.pages[:10] = np.uint64(0x0101010101010101)
    sink, _ = gathered(last)
    (found,) = sink.changed()

    assert found.whole.tolist() == list(range(10, 16))
    assert found.numbers.tolist() == []
    assert (last.pages == np.uint64(0x0101010101010101)).all()
    assert last.written[10:].all()
    assert sink.private["pc.bios"][1, 0] == 9


def test_of_a_page_that_comes_twice_the_later_counts(last: Mapping) -> None:
    sink, parser = gathered(last)
    sink.changed()
    parser.feed(word(colo_parser.REQUEST))
    parser.reply()
    memory = pages("pc.ram", 5, 3, fill=6) + pages("pc.ram", 3, fill=7)
    parser.feed(word(colo_parser.SEND) + memory + bytes([EOF]))
    (found,) = sink.changed()

    assert found.numbers.tolist() == [3, 5]
    assert (found.pages.view(np.uint8)[:, 0]).tolist() == [7, 6]
    assert (last.pages[3].view(np.uint8) == 1).all()


def test_pages_beyond_what_is_kept_aside_go_to_the_last_copy(last: Mapping) -> None:
    sink, parser = gathered(last, most=2)
    sink.changed()
    parser.feed(word(colo_parser.REQUEST))
    parser.reply()
    memory = pages("pc.ram", 5, fill=6) + pages("pc.ram", 1, 5, 9, fill=7)
    parser.feed(word(colo_parser.SEND) + memory + bytes([EOF]))
    (found,) = sink.changed()

    assert sorted([*found.numbers.tolist(), *found.whole.tolist()]) == [1, 5, 9]
    newest = last.pages.copy()
    newest[found.numbers] = found.pages
    assert newest.view(np.uint8).reshape(16, PAGE)[[1, 5, 9], 0].tolist() == [7, 7, 7]
    last.pages[:] = newest
    assert sink.changed()[0].count == 0


def test_zeros_are_pages_too_after_the_first_pass(last: Mapping) -> None:
    sink, parser = gathered(last)
    sink.changed()
    parser.feed(word(colo_parser.REQUEST))
    parser.reply()
    out: list[bytes] = []
    writer = StreamWriter(HEAD, lambda data: out.append(bytes(data)))
    writer.zeros("pc.ram", np.array([PAGE], dtype=np.uint64))
    parser.feed(word(colo_parser.SEND) + b"".join(out) + bytes([EOF]))
    (found,) = sink.changed()

    assert found.numbers.tolist() == [1]
    assert not found.pages.any()


def test_memory_that_is_in_no_file_we_know_is_refused(last: Mapping) -> None:
    files = [MemoryFile(("ram-node0",), 16 * PAGE, Path("/nowhere"))]
    with pytest.raises(CannotCapture):
        ColoParser(Gathered(files, [last], most=1)).feed(FIRST)


def test_pages_of_an_epoch_that_was_not_sent_come_with_the_next(last: Mapping) -> None:
    sink, parser = gathered(last)
    sink.changed()
    found = Changed(numbers=np.zeros(0, dtype=np.intp), pages=last.pages[:0])
    for fill, numbers in ((6, (3, 5, 8)), (7, (5, 9))):
        parser.feed(word(colo_parser.REQUEST))
        parser.reply()
        parser.feed(checkpoint(*numbers, fill=fill))
        parser.loaded()
        (found,) = sink.changed()
        if fill == 6:
            # Of the three one was sent before the line broke.
            last.pages[8] = found.pages[found.numbers.tolist().index(8)]

    assert found.numbers.tolist() == [3, 5, 9]
    assert found.pages.view(np.uint8)[:, 0].tolist() == [6, 7, 7]
