"""Which schedules there are for which guests, and how often snapshots pay."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.builders import GUEST, HOST
from tests.support.policies import policy
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.model.guest import GuestState
from vmckpt.policy.calendar import Interval
from vmckpt.policy.model import Auto, Policy
from vmckpt.scheduler import schedules
from vmckpt.scheduler.agenda import Order
from vmckpt.scheduler.schedules import LEAST, OptimalInterval, ScheduleSelection
from vmckpt.units import Seconds

BETA = replace(HOST, name="beta")
OFF = replace(GUEST, state=GuestState.SHUT_OFF)
SEEN = schedules.sighted([(HOST, GUEST)], (), {})
NEAR = ("near", "far")
ALL = ScheduleSelection()


def mine(*lines: str) -> Policy:
    text = "version: vmckpt/v1\nname: mine\nselect: {guests: [web*]}\nsnapshots:\n"
    return policy(text + "".join(f"  - {line}\n" for line in lines))


def reckoned(uuid: str, _: Auto) -> OptimalInterval:
    return OptimalInterval(Interval(Seconds(600.0)), f"for {uuid}")


def ordered(
    made: Policy, stores: Sequence[str] = NEAR, wanted: ScheduleSelection = ALL
) -> tuple[list[Order], list[str]]:
    return schedules.ordered(SEEN.values(), [made], stores, wanted, reckoned)


def test_a_guest_that_runs_counts_more_than_its_definition_elsewhere() -> None:
    for found in ([(HOST, OFF), (BETA, GUEST)], [(BETA, GUEST), (HOST, OFF)]):
        (one,) = schedules.sighted(found, (), {}).values()
        assert (one.place.host, one.place.active, one.place.seen) == ("beta", True, True)


def test_a_guest_of_a_silent_host_is_where_it_was_and_out_of_sight() -> None:
    (gone,) = schedules.sighted([], {"alpha"}, SEEN).values()
    assert (gone.place.host, gone.place.active, gone.place.seen) == ("alpha", True, False)
    (old,) = schedules.sighted([(BETA, OFF)], {"alpha"}, SEEN).values()
    assert (old.place.host, old.place.seen) == ("alpha", False)
    (moved,) = schedules.sighted([(BETA, GUEST)], {"alpha"}, SEEN).values()
    assert (moved.place.host, moved.place.seen) == ("beta", True)
    assert schedules.sighted([], (), SEEN) == {}


def test_schedules_land_in_their_store_or_in_the_first_one() -> None:
    found, wrong = ordered(mine("{name: often, every: 1h}", "{name: far, every: 1d, store: far}"))

    assert wrong == []
    assert [(one.schedule.name, one.store, one.policy) for one in found] == [
        ("often", "near", "mine"), ("far", "far", "mine"),
    ]  # fmt: skip
    assert found[0].when == Interval(Seconds(3600.0))


def test_auto_is_reckoned_for_each_guest() -> None:
    ([one], _) = ordered(mine("{name: paying, every: auto}"))

    assert (one.when, one.reckoned) == (Interval(Seconds(600.0)), f"for {GUEST.uuid}")


@pytest.mark.parametrize(
    ("line", "stores", "told"),
    [
        ("{name: a, every: 1h}", (), "no stores in the inventory; add, for example, stores:"),
        ("{name: a, every: 1h, store: fra}", NEAR, "no store 'fra' in the inventory; did you mean"),
        ("{name: a, every: 1h, copies: [{to: fra}]}", NEAR, "no store 'fra'"),
        ("{name: a, every: 1h, copies: [{to: near}]}", NEAR, "already the schedule"),
    ],
)
def test_a_schedule_whose_stores_cannot_be_used_is_left_out_and_said(
    line: str, stores: Sequence[str], told: str
) -> None:
    found, wrong = ordered(mine(line, "{name: good, every: 1h, store: near}"), stores)

    assert [one.schedule.name for one in found] == (["good"] if stores else [])
    assert wrong[0].startswith("mine.yaml: schedule a: ")
    assert told in wrong[0]


def test_only_those_asked_for_are_ordered_and_who_is_missing_is_said() -> None:
    made = mine("{name: often, every: 1h}")
    for name in (GUEST.name, GUEST.uuid):
        assert len(ordered(made, wanted=ScheduleSelection(guests=(name,)))[0]) == 1

    found, wrong = ordered(made, wanted=ScheduleSelection(guests=("wbe1",)))
    assert found == []
    assert wrong == ["guest 'wbe1' was not found on any host that answered; did you mean 'web1'?"]
    found, wrong = ordered(made, wanted=ScheduleSelection(policy="nix"))
    assert found == []
    assert wrong[0].startswith("web1: no policy 'nix'")


def test_before_there_was_a_snapshot_its_cost_is_assumed() -> None:
    found = schedules.optimal_interval(Auto(Seconds(86400.0)), (), 1000.0)

    assert found.when.every >= LEAST
    assert found.text.startswith("C = 5.0 s (assumed: no recent snapshot is recorded); M = ")


def test_auto_is_reckoned_from_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    report = {"pause_ms": 10.0, "took_ms": 2000.0}
    with Journal() as journal:
        for kind in ("snapshot", "snapshot", "restore"):
            id_ = journal.begin(NewOperation(kind=kind, guest="web1", guest_uuid="u"))
            journal.finish(id_, "completed", report)
        past = journal.recent("u", 0.0)
        found = schedules.optimal_interval(Auto(Seconds(86400.0)), past, journal.now())

    # C = 0.01 + 0.3 * 2 = 0.61 s; M = 1 day / 2; sqrt(2 * 0.61 * 43200) = 229.6 s
    assert found.when == Interval(Seconds(300.0))
    assert "C = 10 ms + 30% of 2.0 s = 610 ms, from the last 2" in found.text
    assert "(1 failure + 1)" in found.text
    assert "3 min 50 s (Young); at least 5 min 00 s" in found.text
