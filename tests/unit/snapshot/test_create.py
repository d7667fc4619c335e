"""What a snapshot's controller refuses, answers and remembers."""

import asyncio
from typing import Any

import pytest

from vmckpt.agent.protocol import error_from_json
from vmckpt.errors import (
    BadInput,
    HypervisorError,
    LeaseLost,
    VmckptError,
)
from vmckpt.journal.records import ControllerIdentity, Operation
from vmckpt.snapshot import create
from vmckpt.snapshot.create import SnapshotSession, left_behind
from vmckpt.snapshot.request import TakeRequest


@pytest.mark.parametrize("error", [HypervisorError("the journal", host=""), LeaseLost("lost")])
def test_a_journal_that_is_slow_is_a_no(error: VmckptError) -> None:
    """Else the agent would lose its controller in the middle of its work."""

    class Desk:
        def check(self) -> None:
            raise error

    work = SnapshotSession.__new__(SnapshotSession)
    vars(work)["_step_log"] = Desk()
    told = asyncio.run(work._answer("intend", {"step": "capture", "facts": ""}))
    assert told["refused"] == error.message
    assert type(error_from_json(told["error"], "")) is type(error)


@pytest.mark.parametrize(
    ("name", "tags", "good"),
    [
        ("before upgrade", {"a": "b"}, True), ("ä" * 255, {}, True), (None, {}, True),
        ("x" * 256, {}, False), ("a\tb", {}, False), ("\udcff", {}, False),
        ("a", {"a": "x" * 256}, False), ("a", {f"{n}": "" for n in range(65)}, False),
    ],
)  # fmt: skip
def test_words_are_refused_before_anything_is_done(
    name: str | None, tags: dict[str, str], good: bool
) -> None:
    request = TakeRequest(guest="web1", name=name, tags=tags)
    if good:
        create.check_words(request)
        return
    with pytest.raises(BadInput, match=r"printable characters each: .*; use"):
        create.check_words(request)


def past(source: str | None, store: str, outcome: str = "completed", id_: str = "s-1") -> Operation:
    return Operation(
        id="job", kind="snapshot", guest="web1", guest_uuid="u-1", source=source, target=None,
        mode=None, policy=None, state="ended", phase=None, outcome=outcome, asked_by="me@here",
        asked_from=None, controller=ControllerIdentity(host="here", boot="b", pid=1, started=1),
        began_at=0.0, ended_at=1.0, detail={"store": store}, report={"id": id_},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("known", "where"),
    [
        ([], None),
        ([("alpha", "near")], ("alpha", "s-1")),
        ([("beta", "near")], None),
        ([("beta", "near"), ("alpha", "near")], None),
        ([("alpha", "far"), ("beta", "near")], None),
        ([("alpha", "near", "failed"), ("gamma", "near")], ("gamma", "s-1")),
        ([(None, "near")], None),
    ],
)
def test_where_the_line_ends(known: list[Any], where: tuple[str, str] | None) -> None:
    assert left_behind([past(*one) for one in known], "near", "beta") == where
