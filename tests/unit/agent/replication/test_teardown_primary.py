"""How a protection ends on the host of a guest that runs: never with two copies that are heard."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.replicas import LEASE, session
from vmckpt.agent.orders import ReplicaOrder
from vmckpt.agent.replication import mirrors, orders, teardown
from vmckpt.errors import GuestLocked, LeaseLost, TwoCopies, VmckptError
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication.primary import network_buffer
from vmckpt.replication.session import Session


class World:
    """A host on which the guest runs; what is done to it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.did = folder, list[str]()
        self.sent: float | None = 7.0
        """What the lease store says to a renewal; None: another host has the lease."""
        self.silent = False
        note = self.did.append
        monkeypatch.setattr(orders, "folder_of", lambda _: folder)
        monkeypatch.setattr(orders, "_stop_agent", lambda _: note("agent ended"))
        monkeypatch.setattr(orders, "QmpMonitor", Monitor)
        monkeypatch.setattr(identity, "runs", lambda _: True)
        monkeypatch.setattr(identity, "hold", lambda _: Process(note))
        monkeypatch.setattr(teardown, "unprotect", lambda *_: note("output let out"))
        monkeypatch.setattr(teardown, "forget", lambda *_: note("forgotten"))
        monkeypatch.setattr(teardown, "renewed", self._renewed)
        monkeypatch.setattr(teardown, "disarm", lambda _: note("disarmed"))
        monkeypatch.setattr(teardown, "lease", self._lease)
        monkeypatch.setattr(teardown, "token", lambda _: 3)
        monkeypatch.setattr(mirrors, "end_all", lambda *_: None)
        self.fails = False

    def _renewed(self, _: Session, sent: float) -> None:
        if self.fails:
            raise VmckptError("its main thread does not stop")
        self.did.append(f"timer set by {sent:g}")

    @contextmanager
    def _lease(self, _: Session) -> Iterator[Any]:
        def renew(token: int) -> float | None:
            assert token == 3
            if self.silent:
                raise LeaseUnreachable("the lease store is silent")
            return self.sent

        def noted(what: str) -> Any:
            return lambda *given: self.did.append(f"{what} {' '.join(map(str, given))}")

        yield SimpleNamespace(
            renew=renew, invalidate=lambda _: 4, validate=noted("valid"), hand_over=noted("given"),
        )  # fmt: skip

    def end(self, told: Session, **more: Any) -> list[str]:
        order = ReplicaOrder(what="end", guest=told.guest, uri="", host="alpha", **more)
        return orders._end_primary(order, told)

    def give(self, told: Session) -> bool:
        told.write(self.folder)
        order = ReplicaOrder(
            what="give", guest=told.guest, uri="", host="alpha", owner=PROTECTED.session
        )
        return bool(orders._give(order)["given"])


class Monitor:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Process:
    def __init__(self, note: Any) -> None:
        self._note = note

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def end(self, _: float) -> bool:
        self._note("killed")
        return True


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


PROTECTED = session(lease=LEASE, disks=())


def test_a_copy_that_nobody_heard_is_killed_and_not_let_out(one: World) -> None:
    (line,) = one.end(PROTECTED, define=False, standby_gone=True)
    assert one.did == ["agent ended", "killed", "forgotten"]
    assert line == (
        "killed the copy on alpha and discarded its buffered output; the guest is running on beta"
    )


def test_of_two_that_were_heard_none_is_chosen(one: World) -> None:
    teardown.note_alone(one.folder)
    with pytest.raises(TwoCopies, match="both copies was released") as caught:
        one.end(PROTECTED, define=False, standby_gone=True)
    assert one.did == []
    assert "virsh" in str(caught.value)


def test_a_copy_that_its_agent_lets_out_as_it_ends_is_not_killed(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "_stop_agent", teardown.note_alone)
    with pytest.raises(TwoCopies, match="both copies was released"):
        one.end(PROTECTED, define=False, standby_gone=True)
    assert one.did == []


def test_a_guest_that_moves_and_was_never_given_away_runs_on(one: World) -> None:
    one.end(session(moves=True, disks=()), define=False, standby_gone=True)
    assert one.did == ["agent ended", "output let out"]


def test_output_is_not_let_out_where_another_host_has_the_lease(one: World) -> None:
    one.sent = None
    with pytest.raises(TwoCopies, match="another host holds its lease"):
        one.end(PROTECTED, standby_gone=True)
    assert one.did == []
    with pytest.raises(LeaseLost):
        one.end(PROTECTED)
    assert one.did == []


def test_a_silent_lease_store_keeps_nobody_whose_standby_is_gone(one: World) -> None:
    one.silent = True
    one.end(PROTECTED, standby_gone=True)
    assert one.did == ["disarmed", "agent ended", "output let out"]


def test_without_a_standby_the_timer_goes_first(one: World) -> None:
    """Who ends it may die or hang at any moment: the kernel would end the only copy there is."""
    one.end(PROTECTED, standby_gone=True)
    assert one.did[:2] == ["disarmed", "agent ended"]


def test_the_timer_is_set_before_the_agent_is_ended(one: World) -> None:
    one.end(PROTECTED)
    assert one.did == ["timer set by 7", "agent ended", "disarmed", "output let out"]
    one.did.clear()
    one.fails = True
    with pytest.raises(VmckptError, match="does not stop"):
        one.end(PROTECTED)
    assert one.did == []


def test_a_guest_that_ended_before_its_standby_was_declared_valid_is_given_to_it(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if agent and guard were killed between arming the timer and saying so."""
    monkeypatch.setattr(identity, "runs", lambda _: False)
    assert one.give(PROTECTED)
    assert one.did == ["valid 3", "given 3 beta"]


def test_a_guest_that_runs_or_went_on_alone_is_given_to_no_standby(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GuestLocked, match="is running on alpha"):
        one.give(PROTECTED)
    monkeypatch.setattr(identity, "runs", lambda _: False)
    teardown.note_alone(one.folder)
    with pytest.raises(GuestLocked, match="ran unprotected before it stopped"):
        one.give(PROTECTED)
    assert not one.give(session(lease=None, disks=()))
    assert one.did == []


def test_that_output_was_let_out_is_noted_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(*_: object) -> None:
        raise VmckptError(f"alone: {teardown.is_alone(tmp_path)}")

    monkeypatch.setattr(teardown, "disarm", lambda _: None)
    monkeypatch.setattr(network_buffer, "remove", remove)
    with pytest.raises(VmckptError, match="alone: True"):
        teardown.unprotect(PROTECTED, tmp_path, cast("Any", None))
