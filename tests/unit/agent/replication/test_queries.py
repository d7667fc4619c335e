"""What is told of a protection whose agent does not answer."""

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.replicas import session
from tests.support.scratch_qemu import SIZE, Scratch
from tests.support.staging import in_memory
from vmckpt.agent.orders import ReplicaOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.replication import handover, orders, queries, teardown
from vmckpt.capture.memory import write_tracking
from vmckpt.errors import CannotCapture, GuestLocked
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.model.epoch_cost import Finder
from vmckpt.replication.control_socket import Control
from vmckpt.replication.watchdog import process


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with in_memory() as made:
        monkeypatch.setattr(orders, "folder_of", lambda _: made)
        session().write(made)
        yield made


def asked() -> dict[str, Any]:
    one = session()
    order = ReplicaOrder(what="ask", guest=one.guest, uri=one.uri, host=one.host)
    return orders.carry_out(order, ControllerChannel(io.StringIO(), io.StringIO()))


def test_an_agent_that_is_gone_is_told_with_its_last_words(folder: Path) -> None:
    (folder / process.AGENT_LOG).write_text("Traceback\nStageFull: no room: make some\n")

    told = asked()

    assert (told["agent"], told["runs"]) == (False, False)
    assert told["says"].endswith(": StageFull: no room: make some")
    assert "outcome" not in told


def test_an_agent_that_is_just_started_again_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "runs", lambda _: True)
    again: list[Control] = []

    def starts() -> None:
        again.append(Control(folder, lambda _: {"epoch": 7}))
        again[0].__enter__()

    later = threading.Timer(0.3, starts)
    later.start()
    try:
        told = asked()
    finally:
        later.join()
        again[0].__exit__()
    assert (told["agent"], told["epoch"]) == (True, 7)


def test_a_guest_that_its_guard_has_ended_is_told_so_though_its_agent_died_before(
    folder: Path,
) -> None:
    (folder / process.KILLED).write_text("2026-01-01T00:00:00Z the lease has ended: too late\n")

    told = asked()

    assert told["outcome"] == "died"
    assert told["why"] == "the watchdog killed the guest: the lease has ended: too late"


def test_what_an_agent_left_of_its_end_goes_before_that(folder: Path) -> None:
    (folder / process.KILLED).write_text("2026-01-01T00:00:00Z the lease has ended\n")
    outcome = {"outcome": "switched", "why": "the guest runs on beta"}
    (folder / teardown.OUTCOME).write_text(json.dumps(outcome))

    told = asked()

    assert (told["outcome"], told["why"]) == ("switched", "the guest runs on beta")


@pytest.fixture
def started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to agents."""
    done: list[str] = []
    monkeypatch.setattr(orders, "_end_agent", lambda _: done.append("ended"))
    monkeypatch.setattr(orders, "_begin", lambda *_: done.append("started"))
    return done


def revived(owner: str) -> dict[str, Any]:
    one = session()
    order = ReplicaOrder(what="revive", guest=one.guest, uri=one.uri, host=one.host, owner=owner)
    return orders.carry_out(order, ControllerChannel(io.StringIO(), io.StringIO()))


def test_an_agent_that_nothing_starts_again_is_started(folder: Path, started: list[str]) -> None:
    (folder / process.OVER).touch()  # by a command that was killed

    assert revived(session().session) == {"did": [f"restarted vmckpt's agent on {session().host}"]}
    assert started == ["ended", "started"]
    assert not (folder / process.OVER).exists()


def test_an_agent_that_answers_or_has_ended_or_is_another_s_is_left_alone(
    folder: Path, started: list[str]
) -> None:
    assert revived("another")["did"] == []
    with Control(folder, lambda _: {"epoch": 7}):
        assert revived(session().session)["did"] == []
    (folder / teardown.OUTCOME).write_text("{}")
    assert revived(session().session)["did"] == []
    assert started == []


def test_a_folder_has_one_agent(folder: Path) -> None:
    with (
        handover.only_agent(session(), folder),
        pytest.raises(GuestLocked, match="agent for web1 is already running"),
        handover.only_agent(session(), folder),
    ):
        pass
    with handover.only_agent(session(), folder):
        pass


def memory_facts(guest: Scratch, finder: str = "") -> dict[str, Any]:
    monitor: Any = guest
    with HeldProcess(guest.pid) as held:
        return queries._memory_facts(monitor, held, finder)


@pytest.mark.parametrize("private", [True, False])
def test_a_guest_is_tracked_whatever_its_memory_is(private: bool) -> None:
    with Scratch(accelerator="tcg", private=private) as guest:
        told = memory_facts(guest)
    assert told["memory"] == [SIZE]
    assert [name for name, _ in told["private"]] == ["pc.rom", "pc.bios"]
    assert told["epoch_cost"]["finder"] == Finder.WRITE_TRACKING
    assert told["epoch_cost"]["written"] > 0


def test_a_guest_whose_writes_cannot_be_tracked_needs_memory_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(write_tracking, "_FEATURES", 1 << 60)
    with Scratch(accelerator="tcg", private=True) as guest:
        with pytest.raises(CannotCapture, match="is private to QEMU"):
            memory_facts(guest)
        with pytest.raises(CannotCapture, match=r"cannot be tracked: .*Linux 6\.7") as caught:
            memory_facts(guest, Finder.WRITE_TRACKING)
        assert "vmckpt doctor" in str(caught.value.hint)


def test_comparing_can_be_chosen() -> None:
    with (
        Scratch(accelerator="tcg", private=True) as guest,
        pytest.raises(CannotCapture, match="is private to QEMU"),
    ):
        memory_facts(guest, Finder.COMPARE)
