"""Pages of a snapshot that several processes get when they read them."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.template_store import EXPECTED, PAGES, Store, content
from tests.support.written_process import WrittenProcess
from vmckpt.agent.restore.template_memory import TemplateMemory
from vmckpt.capture.memory.missing_pages import MissingPages
from vmckpt.errors import StoreError
from vmckpt.hypervisor.qemu_process import userfaultfd


class Fork:
    """A process whose memory is missing, and the server's view of it."""

    def __init__(self, stack: ExitStack) -> None:
        self.process = stack.enter_context(WrittenProcess(PAGES))
        number = userfaultfd.create_inside(self.process.held)
        self.pages = MissingPages(self.process.held, number, [self.process.range])
        stack.enter_context(self.pages)
        self.pages.register()

    def read(self, template: TemplateMemory, page: int) -> tuple[int, int]:
        """The byte that the process reads, and the pages that were copied for it."""
        found: list[int] = []
        reading = threading.Thread(
            target=lambda: found.extend(self.process.read([page])), daemon=True
        )
        reading.start()
        (address,) = self.pages.faults(5.0)
        where = self.process.range
        copied = template.give(self.pages, where, "pc.ram", address - where.start)
        reading.join()
        return found[0], copied


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_forks_get_only_what_they_read_and_the_store_is_read_once(stack: ExitStack) -> None:
    store = Store()
    template = TemplateMemory({"pc.ram": content(store)})
    one, two = Fork(stack), Fork(stack)
    assert one.read(template, 70) == (71, 4)
    assert store.read_chunks == [1]
    assert two.read(template, 75) == (76, 4)
    assert one.read(template, 100) == (101, 4)
    assert store.read_chunks == [1]
    assert one.read(template, 12) == (0, 0)
    assert one.read(template, 200) == (0, 0)
    assert one.read(template, 9) == (10, 2), "its neighbours 10 and 11 are zeros"


def test_a_fork_that_is_kept_gets_everything(stack: ExitStack) -> None:
    template = TemplateMemory({"pc.ram": content(Store())})
    fork = Fork(stack)
    fork.read(template, 130)
    fork.process.write([130])
    for group in template.groups("pc.ram"):
        template.give_group(fork.pages, fork.process.range, "pc.ram", group)
    fork.pages.unregister()
    expected = [*EXPECTED]
    expected[130] += 1
    assert fork.process.read(range(PAGES)) == expected


def test_a_store_without_an_answer_is_asked_again(stack: ExitStack) -> None:
    store = Store()
    template = TemplateMemory({"pc.ram": content(store)})
    fork = Fork(stack)
    store.answers.clear()
    where = fork.process.range
    with pytest.raises(StoreError, match="no answer"):
        template.give(fork.pages, where, "pc.ram", 70 * 4096)
    store.answers.set()
    assert template.give(fork.pages, where, "pc.ram", 70 * 4096) == 4
    assert fork.process.read([70]) == [71]
