"""The server of a family, with processes in place of QEMU."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.template_store import PAGES, Store, content
from tests.support.written_process import WrittenProcess
from vmckpt.agent.restore import family_server
from vmckpt.agent.restore.family_server import Member, _Family
from vmckpt.agent.restore.page_server import ServedMemory
from vmckpt.capture.memory.missing_pages import MissingPages
from vmckpt.errors import BadInput
from vmckpt.hypervisor.qemu_process import identity, userfaultfd
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.units import Seconds


class Setup:
    """A family whose forks are processes."""

    def __init__(self, folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.stack, self.store = folder, stack, Store()
        self.processes: dict[str, WrittenProcess] = {}
        monkeypatch.setattr(identity, "hold", self.hold)
        monkeypatch.setattr(family_server, "_blocks", lambda *_: {"pc.ram": content(self.store)})
        monkeypatch.setattr(family_server, "_TURN", Seconds(0.02))
        monkeypatch.setattr(family_server, "_AGAIN", Seconds(0.05))
        self.family = self.another()

    def another(self) -> _Family:
        """A server that begins with what is recorded."""
        private = cast("Any", SimpleNamespace(facts=SimpleNamespace(disks=())))
        order = cast("Any", SimpleNamespace(host="alpha", uri="", family="f"))
        family = _Family(order, self.folder, private, cast("Any", None))
        thread = threading.Thread(target=family.answer, daemon=True)
        thread.start()
        self.stack.callback(thread.join)
        self.stack.callback(family.close)
        return family

    def hold(self, guest: str) -> HeldProcess | None:
        held = self.processes[guest].held
        return HeldProcess(held.pid) if held.lives() else None

    def start(self, guest: str) -> Member:
        process = self.processes[guest] = self.stack.enter_context(WrittenProcess(PAGES))
        number = userfaultfd.create_inside(process.held)
        with MissingPages(process.held, number, [process.range]) as pages:
            pages.register()
        where = process.range.start, process.range.size
        memory = ServedMemory(pid=process.held.pid, number=number, blocks={"pc.ram": where})
        image = self.folder.parent / f"{guest}.qcow2"
        image.touch()
        return Member(
            guest=guest, name=guest, xml="<domain/>", images={"vda": str(image)},
            memory=memory.as_json(),
        )  # fmt: skip


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    (tmp_path / "family-f").mkdir()
    with ExitStack() as stack:
        yield Setup(tmp_path / "family-f", stack, monkeypatch)


def test_forks_are_served_until_they_end_and_then_their_files_are_removed(setup: Setup) -> None:
    for guest in ("a", "b"):
        setup.family.add(setup.start(guest))
    assert setup.processes["a"].read([70, 200]) == [71, 0]
    assert setup.processes["b"].read([71]) == [72]
    assert setup.store.read_chunks == [1]
    setup.processes["a"].kill()
    ending = threading.Thread(target=setup.family.run, daemon=True)
    ending.start()
    ending.join(0.5)
    assert set(family_server.members(setup.folder)) == {"b"}
    assert [one.name for one in setup.folder.parent.glob("*.qcow2")] == ["b.qcow2"]
    setup.processes["b"].kill()
    ending.join(5.0)
    assert not ending.is_alive()
    assert not list(setup.folder.parent.glob("*.qcow2"))


def test_the_next_server_serves_the_forks_of_a_killed_one(setup: Setup) -> None:
    member = setup.start("a")
    setup.family.add(member)
    assert setup.processes["a"].read([70]) == [71]
    setup.family.close()
    found: list[int] = []
    reading = threading.Thread(
        target=lambda: found.extend(setup.processes["a"].read([130])), daemon=True
    )
    reading.start()
    reading.join(0.2)
    assert found == []
    known = family_server.members(setup.folder)
    assert ServedMemory.from_json(known["a"].memory) == ServedMemory.from_json(member.memory)
    assert setup.another().attach(known["a"])
    reading.join(5.0)
    assert found == [131]


def test_a_store_that_does_not_answer_lets_forks_wait(setup: Setup) -> None:
    setup.family.add(setup.start("a"))
    setup.store.answers.clear()
    found: list[int] = []
    reading = threading.Thread(
        target=lambda: found.extend(setup.processes["a"].read([70])), daemon=True
    )
    reading.start()
    reading.join(0.3)
    assert found == []
    setup.store.answers.set()
    reading.join(5.0)
    assert found == [71]


def test_a_process_that_is_not_the_recorded_one_is_not_served(setup: Setup) -> None:
    member = setup.start("a")
    other = {**member.memory, "number": 999}
    assert not setup.family.attach(Member(**{**asdict(member), "memory": other}))
    setup.processes["a"].kill()
    assert not setup.family.attach(member)


def test_if_the_creator_disappears_all_forks_end(setup: Setup) -> None:
    for guest in ("a", "b"):
        setup.family.add(setup.start(guest))
    setup.family.end_all()
    setup.family.run()
    assert not any(one.held.lives() for one in setup.processes.values())
    assert family_server.members(setup.folder) == {}


def test_an_invalid_record_is_named(setup: Setup) -> None:
    (setup.folder / "members.json").write_text('{"a": {"x": 1}}')
    with pytest.raises(BadInput, match=r"members\.json is invalid"):
        family_server.members(setup.folder)
