"""The snapshots of a group: who hears of their progress, and what is refused before all else."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.builders import GUEST, HOST
from vmckpt.errors import BadInput, RemoteError, StoreError
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Caller, Copied, Event, PhaseChanged
from vmckpt.model.migration import JobPhase
from vmckpt.snapshot.group import create
from vmckpt.snapshot.request import Taken, TakeRequest
from vmckpt.store.repository import Store
from vmckpt.units import Bytes

NEAR = StorePlace(name="near", url="/nowhere")


def caller(told: list[Event]) -> Caller:
    return Caller(emit=told.append, warn=lambda _: None, stop=asyncio.Event())


def copied(done: int, total: int) -> Copied:
    return Copied(phase="capture", done=Bytes(done), total=Bytes(total), new=Bytes(0))


def test_of_all_members_together_one_progress_is_told() -> None:
    told: list[Event] = []
    of = create.listening(caller(told))
    one, other = of("web1 on alpha"), of("db1 on beta")
    one.emit(copied(50, 100))
    other.emit(copied(10, 100))
    one.emit(copied(100, 100))
    other.emit(PhaseChanged(phase=JobPhase.DONE))

    assert told == [copied(50, 100), copied(60, 200), copied(110, 200)]


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (TakeRequest(guest="", memory=False), "a group snapshot always includes memory"),
        (TakeRequest(guest="", name="a\tb"), "printable characters"),
    ],
)
async def test_what_no_group_can_have_is_refused_before_any_host_is_asked(
    request_: TakeRequest, told: str
) -> None:
    nobody: Any = None
    with pytest.raises(BadInput, match=told):
        await create.take(
            [(HOST, GUEST)], NEAR, nobody, request_, caller([]), hosts={"alpha": HOST}
        )


async def test_a_group_whose_outcome_is_unknown_is_left_to_recovery() -> None:
    nothing: Any = None
    request_ = TakeRequest(guest=GUEST.uuid)
    member = create._Member(host=HOST, guest=GUEST, request=request_, recorder=nothing)
    group = create._Group([member], NEAR, nothing, caller([]))
    failed = await group._failed([RemoteError("alpha: the agent exited")], ())
    assert isinstance(failed, RemoteError)
    assert "the outcome for web1 on alpha is unknown" in failed.message
    assert not failed.undone


async def test_published_members_are_deleted_even_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    deleted: list[str] = []

    def delete(id_: str) -> None:
        deleted.append(id_)
        if id_ == "s-2":
            raise StoreError("the store is full")

    monkeypatch.setattr(Store, "open", lambda _: SimpleNamespace(delete=delete))
    group = create._Group([], NEAR, nothing, caller([]))
    taken = [cast("Taken", SimpleNamespace(id=id_)) for id_ in ("s-1", "s-2")]
    failed = await group._failed([*taken, ZeroDivisionError("a bug")], taken)

    assert deleted == ["s-1", "s-2"]
    assert isinstance(failed, ZeroDivisionError)
    assert failed.__notes__ == ["the group snapshot failed; could not delete s-2 from the store"]
