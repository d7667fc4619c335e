"""A cut through several guests: who is waited for, who is late, and what is let go."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.groups import MEMBERS, PHASES
from tests.support.snapshots import PUBLIC
from tests.support.stocking import Stock, stock
from vmckpt.agent.snapshot import create
from vmckpt.capture import network_hold
from vmckpt.errors import BadInput
from vmckpt.model.events import Copied
from vmckpt.model.recovery import Phase
from vmckpt.snapshot.group import rules
from vmckpt.snapshot.group.rules import Meeting
from vmckpt.units import Bytes
from vmckpt_lab import guest_chat
from vmckpt_lab.guest_chat import Chat, Peer

__all__ = ["stock"]


def meeting(phase: Phase = Phase.READY, **more: Any) -> Meeting:
    return Meeting(members=MEMBERS, phase=phase, since=10.0, **more)


@pytest.mark.parametrize("phase", PHASES)
def test_all_go_on_together(phase: Phase) -> None:
    one = rules.arrived(meeting(phase), "a", phase, 11.0)
    assert (one.phase, one.here, one.since) == (phase, frozenset("a"), 10.0)
    both = rules.arrived(one, "b", phase, 12.0)
    following = PHASES[PHASES.index(phase) + 1] if phase is not Phase.STORED else None
    assert (both.phase, both.here, both.since) == (following, frozenset(), 12.0)


@pytest.mark.parametrize(
    ("member", "phase", "here"),
    [("c", Phase.READY, ()), ("a", Phase.STOPPED, ()), ("a", Phase.READY, ("a",))],
)
def test_nobody_comes_out_of_turn(member: str, phase: Phase, here: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="the group waits for"):
        rules.arrived(meeting(here=frozenset(here)), member, phase, 11.0)


@pytest.mark.parametrize(
    ("phase", "after", "late", "left"),
    [
        (Phase.READY, 59.0, (), 1.0),
        (Phase.READY, 60.0, ("b",), 0.0),
        (Phase.STOPPED, 4.5, (), 0.5),
        (Phase.STOPPED, 5.0, ("b",), 0.0),
        (Phase.CAPTURED, 7.0, ("b",), 0.0),
        (Phase.STORED, 1e6, (), None),
    ],
)
def test_who_is_late(phase: Phase, after: float, late: tuple[str, ...], left: float | None) -> None:
    one = meeting(phase, here=frozenset("a"))
    assert rules.late(one, 10.0 + after) == late
    assert rules.time_left(one, 10.0 + after) == left


def test_no_cut_outlasts_what_holds_it() -> None:
    waits = [Phase.STOPPED, Phase.CAPTURED]
    for phase in (Phase.READY, *waits):
        assert (rules.LIMITS[phase] or 0) < create.PATIENCE[phase]
    assert sum(create.PATIENCE[phase] for phase in waits) < network_hold.LIMIT


@pytest.mark.parametrize("told", [["web1"], ["web1", ""], ["web1", "db1", "web1"], [""]])
def test_what_is_no_group(told: list[str]) -> None:
    with pytest.raises(BadInput):
        rules.check_names(told)
    assert rules.check_names(["web1", " db1 "]) == ("web1", "db1")


def test_a_group_counts_if_all_of_it_is_there() -> None:
    def member(id_: str, size: str, guest: str) -> Any:
        return replace(PUBLIC, group=id_, tags={rules.SIZE: size}, guest=guest)

    whole, half, odd = ("g-" + letter * 16 for letter in "abc")
    told = rules.standing(
        [
            member(whole, "2", "web1"),
            member(whole, "2", "web2"),
            member(half, "3", "web1"),
            member(odd, "many", "web1"),
            replace(PUBLIC, group=None),
        ]
    )
    assert {id_: one.whole for id_, one in told.items()} == {whole: True, half: False, odd: False}
    assert str(told[half]) == f"{half} is incomplete: 1 of 3 guests"


def test_progress_is_that_of_who_is_behind() -> None:
    def of(phase: str, done: int, total: int | None = None) -> Copied:
        return Copied(
            phase=phase, done=Bytes(done), total=None if total is None else Bytes(total),
            new=Bytes(1),
        )  # fmt: skip

    behind = rules.together([of("store", 9), of("capture", 1, 10), of("capture", 2, 10)])
    assert behind == Copied(phase="capture", done=Bytes(3), total=Bytes(20), new=Bytes(2))
    assert rules.together([of("store", 9), of("store", 1)]).done == 10


def peer(sent: int, received: int) -> Peer:
    return Peer(sent=sent, received=received, first=1, count=received)


@pytest.mark.parametrize(("sent", "received", "wrong"), [(5, 5, 0), (5, 4, 0), (5, 6, 1)])
def test_the_check_finds_what_was_received_and_not_sent(
    sent: int, received: int, wrong: int
) -> None:
    one = Chat(own=0, run=1, peers={1: peer(sent, 0)})
    other = Chat(own=1, run=2, peers={0: peer(0, received)})
    assert len(guest_chat.violations([one, other])) == wrong


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "neither a guest nor a group is named"),
        (["web1", "--group", "web1,web2"], "both a guest and a group are named"),
        (["--group", "web1"], "a group needs at least two guests"),
        (["--group", "web1,db1,web1"], "--group names 'web1' twice"),
    ],
)
def test_what_the_command_refuses(stock: Stock, words: list[str], says: str) -> None:
    code, _, told = stock("create", *words)
    assert code == 2
    assert says in told


def test_list_tells_whether_a_group_is_whole(stock: Stock) -> None:
    tags = {rules.SIZE: "2"}
    stock.put("one", [1], group="g-" + "a" * 16, tags=tags)
    stock.put("two", [2], group="g-" + "a" * 16, tags=tags)
    stock.put("half", [3], group="g-" + "b" * 16, tags=tags)
    stock.put("alone", [4])
    _, told, _ = stock("list", "--json")
    found = {one["name"]: one["group"] for one in json.loads(told)}
    assert (found["one"]["there"], found["one"]["of"]) == (2, 2)
    assert (found["half"]["there"], found["half"]["of"]) == (1, 2)
    assert found["alone"] is None
