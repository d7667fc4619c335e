"""A process whose memory comes from a snapshot while it runs."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.template_store import EXPECTED, PAGES, Store, content
from tests.support.written_process import WrittenProcess
from vmckpt.agent.restore import page_server
from vmckpt.agent.restore.page_server import FirstPages, PageServer, ServedMemory, fill_order
from vmckpt.capture.memory.missing_pages import MissingPages
from vmckpt.hypervisor.qemu_process import userfaultfd
from vmckpt.units import Seconds


@pytest.fixture
def process() -> Iterator[WrittenProcess]:
    with WrittenProcess(PAGES) as made:
        yield made


@pytest.fixture
def record(tmp_path: Path) -> FirstPages:
    return FirstPages(tmp_path, "s-1")


def registered(process: WrittenProcess) -> ServedMemory:
    number = userfaultfd.create_inside(process.held)
    with MissingPages(process.held, number, [process.range]) as pages:
        pages.register()
    where = process.range.start, process.range.size
    return ServedMemory(pid=process.held.pid, number=number, blocks={"pc.ram": where})


def server(process: WrittenProcess, store: Store, record: FirstPages) -> PageServer:
    return PageServer(process.held, registered(process), {"pc.ram": content(store)}, record)


def test_pages_come_when_they_are_read_and_the_rest_afterwards(
    process: WrittenProcess, record: FirstPages
) -> None:
    store = Store()
    with server(process, store, record) as pages:
        assert process.read([70, 12, 200]) == [71, 0, 0]
        assert store.read_chunks == [1, 0, 0], "the page's group, in runs between pages of zeros"
        *_, done = pages.fill()
        assert done == PAGES * 4096
    assert process.read(range(PAGES)) == EXPECTED
    assert list(userfaultfd.opened(process.held)) == []
    assert record.read() == [(0, 1), (0, 0), (0, 3)]


def test_what_the_process_wrote_is_kept(process: WrittenProcess, record: FirstPages) -> None:
    with server(process, Store(), record) as pages:
        process.write([5, 11])
        list(pages.fill())
    assert process.read([4, 5, 11]) == [5, 7, 1]


def test_the_groups_that_were_needed_first_are_filled_first_the_next_time(
    process: WrittenProcess, record: FirstPages
) -> None:
    record.write([(0, 2), (0, 1), (7, 7)])
    store = Store()
    with server(process, store, record) as pages:
        list(pages.fill())
    assert list(dict.fromkeys(store.read_chunks)) == [2, 1, 0]


@pytest.mark.parametrize(
    ("sizes", "first", "expected"),
    [
        ([], [], []),
        ([600 << 10], [], [(0, 0), (0, 1), (0, 2)]),
        ([300 << 10, 1], [(1, 0), (1, 0), (1, 1), (2, 0), (-1, 0)], [(1, 0), (0, 0), (0, 1)]),
    ],
)
def test_the_order_of_filling(
    sizes: list[int], first: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert list(fill_order(sizes, first)) == expected


def test_while_the_store_does_not_answer_the_process_waits_and_never_reads_a_wrong_page(
    process: WrittenProcess, record: FirstPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "_AGAIN", Seconds(0.05))
    store = Store()
    store.answers.clear()
    found: list[int] = []
    with server(process, store, record) as pages:
        reading = threading.Thread(target=lambda: found.extend(process.read([70])), daemon=True)
        reading.start()
        filling = pages.fill()
        assert next(filling) == 0
        reading.join(0.3)
        assert (found, str(pages.trouble)) == ([], "near: no answer")
        store.answers.set()
        list(filling)
        reading.join()
        assert (found, pages.trouble) == ([71], None)
    assert process.read(range(PAGES)) == EXPECTED


def test_another_server_takes_over(process: WrittenProcess, record: FirstPages) -> None:
    store = Store()
    memory = registered(process)
    blocks = {"pc.ram": content(store)}
    with PageServer(process.held, memory, blocks, record) as pages:
        process.read([70])
        next(pages.fill())
    found: list[int] = []
    reading = threading.Thread(target=lambda: found.extend(process.read([130])), daemon=True)
    reading.start()
    reading.join(0.2)
    assert found == []
    told = ServedMemory.from_json(memory.as_json())
    with PageServer(process.held, told, blocks, record) as pages:
        reading.join()
        list(pages.fill())
    assert found == [131]
    assert process.read(range(PAGES)) == EXPECTED


def test_a_process_that_ends_is_not_filled_any_further(
    process: WrittenProcess, record: FirstPages
) -> None:
    with server(process, Store(), record) as pages:
        process.kill()
        assert len(list(pages.fill())) < 4
    assert record.read() == []


def test_filling_keeps_to_its_rate(process: WrittenProcess, record: FirstPages) -> None:
    with server(process, Store(), record) as pages:
        began = time.monotonic()
        list(pages.fill(rate=4 << 20))
        assert time.monotonic() - began >= 0.2


def test_only_the_newest_records_are_kept(tmp_path: Path, record: FirstPages) -> None:
    for number in range(70):
        FirstPages(tmp_path, f"s-{number}").write([(0, number)])
    assert len(list((tmp_path / "cache" / "first-pages").iterdir())) == 64
    assert FirstPages(tmp_path, "s-69").read() == [(0, 69)]
    (tmp_path / "cache" / "first-pages" / "s-69.json").write_text('{"x"')
    assert FirstPages(tmp_path, "s-69").read() == []
