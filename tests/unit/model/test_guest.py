"""Which guests have two copies, and what states and jobs mean."""

from dataclasses import replace

import pytest

from tests.support.builders import GUEST
from tests.support.two_copies import TWICE, WEB
from vmckpt.model.guest import (
    LOCKING,
    MEND,
    Copies,
    Guest,
    GuestJob,
    GuestState,
    Presence,
    SnapshotNow,
    confirmed,
    error,
    merged,
    two_copies,
)


@pytest.mark.parametrize(
    ("there", "twice"),
    [
        (WEB, True),
        (replace(WEB, state=GuestState.BLOCKED), True),
        (replace(WEB, state=GuestState.PAUSED), False),
        (replace(WEB, state=GuestState.STANDBY), False),
        (replace(WEB, state=GuestState.TEST), False),
        (replace(WEB, state=GuestState.SHUT_OFF), False),
        (replace(WEB, uuid="u-2"), False),
    ],
)
def test_only_cpus_that_run_count(there: Guest, twice: bool) -> None:
    found = two_copies([("alpha", WEB), ("gamma", replace(WEB, uuid="u-3")), ("beta", there)])
    assert found == ((TWICE,) if twice else ())


def test_a_guest_that_moved_between_two_looks_has_no_two_copies() -> None:
    assert confirmed([TWICE], {}, {"alpha": 9.0, "beta": 9.0}) == ()
    assert confirmed([TWICE], {"u-1": 5.0}, {"alpha": 6.0, "beta": 4.0}) == ()
    assert confirmed([TWICE], {"u-1": 5.0}, {"alpha": 6.0}) == ()
    assert confirmed([TWICE], {"u-1": 5.0}, {"alpha": 6.0, "beta": 7.0}) == (TWICE,)


def test_two_entries_of_a_guest_become_one_with_the_first_reason() -> None:
    told = Copies(guest="web1", uuid="u-1", hosts=("beta", "gamma"), why="gamma has its lease")
    (one,) = merged([TWICE], [told])

    assert one.hosts == ("alpha", "beta", "gamma")
    assert one.text == "web1 may be running on alpha and beta and gamma: gamma has its lease"
    assert one.as_json()["text"] == one.text
    assert error([one]).hint == f"{MEND}; destroy the copy that is not needed"


@pytest.mark.parametrize("state", GuestState)
def test_only_a_guest_with_a_process_runs(state: GuestState) -> None:
    assert Presence(reachable=True, state=state).runs is state.runs
    assert state.is_active or not state.runs
    assert not Presence(reachable=True).runs


@pytest.mark.parametrize(
    ("job", "leaves", "locked"),
    [
        (None, False, False),
        (GuestJob.BACKUP, False, False),
        *((one, one is GuestJob.OUTGOING, True) for one in LOCKING),
    ],
)
def test_a_guest_on_its_way_out_leaves(job: GuestJob | None, leaves: bool, locked: bool) -> None:
    one = replace(GUEST, job=job)

    assert (one.leaves, one.locked) == (leaves, locked)


def test_a_snapshot_that_cannot_be_read_or_was_found_damaged_is_not_good() -> None:
    one = SnapshotNow(id="s1", name="s1", store="near")

    assert one.good
    assert not replace(one, wrong="it is signed by nobody we know").good
    assert not replace(one, verified="a chunk is missing", damaged=True).good
    assert replace(one, verified="bad weather").good, "the text is for display only"
