"""When the backup may run the guest: every combination of what it can know."""

import itertools
from dataclasses import replace

import pytest

from vmckpt.replication.backup.takeover import Decision, Seen, Step, decide
from vmckpt.units import Seconds

PATIENCE = Seconds(0.25)
FOLLOWS = Seen(
    committed=41, silent=Seconds(0.1), has_lease=True, automatic=True, person=False, final=False,
    handed_over=False,
)  # fmt: skip
BY_HAND = replace(FOLLOWS, automatic=False)
NO_LEASE = replace(FOLLOWS, has_lease=False, automatic=False)
SILENT = Seconds(3600.0)

FLAGS = ("has_lease", "automatic", "person", "final", "handed_over")
ALL = [
    replace(FOLLOWS, committed=committed, silent=silent, **dict(zip(FLAGS, flags, strict=True)))
    for committed in (0, 1)
    for silent in (Seconds(0.0), SILENT)
    for flags in itertools.product((False, True), repeat=len(FLAGS))
]


def decided(seen: Seen) -> Decision:
    return decide(seen, patience=PATIENCE)


@pytest.mark.parametrize(
    ("seen", "step", "why"),
    [
        (FOLLOWS, Step.WAIT, "the primary is alive"),
        (replace(FOLLOWS, silent=PATIENCE), Step.WAIT, "the primary is alive"),
        (replace(FOLLOWS, silent=Seconds(0.26)), Step.ASK, "silent for 0.26 s"),
        (replace(FOLLOWS, silent=SILENT, committed=0), Step.WAIT, "no complete epoch"),
        (replace(BY_HAND, silent=SILENT), Step.WAIT, "left to the operator"),
        (replace(BY_HAND, person=True), Step.ASK, "failover requested"),
        (replace(BY_HAND, person=True, silent=SILENT), Step.ASK, "failover requested"),
        (replace(BY_HAND, final=True), Step.ASK, "planned switchover"),
        (replace(FOLLOWS, final=True), Step.ASK, "planned switchover"),
        (replace(FOLLOWS, final=True, handed_over=True), Step.RUN, "handed the guest over"),
        (replace(FOLLOWS, handed_over=True), Step.WAIT, "the primary is alive"),
        (replace(NO_LEASE, silent=SILENT), Step.WAIT, "must be requested"),
        (replace(NO_LEASE, automatic=True, silent=SILENT), Step.WAIT, "must be requested"),
        (replace(NO_LEASE, final=True), Step.WAIT, "must be requested"),
        (replace(NO_LEASE, handed_over=True), Step.WAIT, "must be requested"),
        (replace(NO_LEASE, final=True, handed_over=True), Step.RUN, "handed the guest over"),
        (replace(NO_LEASE, person=True, silent=SILENT), Step.RUN, "declared the primary dead"),
        (replace(NO_LEASE, person=True, silent=Seconds(0.26)), Step.RUN, "the controller declared"),
        (replace(NO_LEASE, person=True, silent=PATIENCE), Step.WAIT, ""),
        (
            replace(NO_LEASE, person=True, silent=SILENT, committed=0),
            Step.WAIT,
            "no complete epoch",
        ),
    ],
)
def test_each_case_is_decided_and_said(seen: Seen, step: Step, why: str) -> None:
    told = decided(seen)

    assert told.step is step
    assert why in told.why


@pytest.mark.parametrize("seen", [one for one in ALL if not one.committed])
def test_a_standby_without_a_whole_epoch_never_runs(seen: Seen) -> None:
    assert decided(seen).step is Step.WAIT


@pytest.mark.parametrize("seen", [one for one in ALL if one.committed])
def test_it_runs_unasked_only_if_handed_over_or_by_a_person_without_a_lease(seen: Seen) -> None:
    dead = seen.person and seen.silent > PATIENCE
    may = (seen.handed_over and seen.final) or (dead and not seen.has_lease)

    assert (decided(seen).step is Step.RUN) == may


@pytest.mark.parametrize("seen", [one for one in ALL if not (one.silent or one.person)])
def test_silence_alone_never_runs_it(seen: Seen) -> None:
    """It makes the lease be asked where it may decide, and changes nothing else."""
    later = decided(replace(seen, silent=SILENT)).step

    if later is not decided(seen).step:
        assert (decided(seen).step, later) == (Step.WAIT, Step.ASK)
        assert seen.has_lease
        assert seen.automatic


@pytest.mark.parametrize("seen", [one for one in ALL if not one.has_lease])
def test_where_there_is_no_lease_none_is_asked(seen: Seen) -> None:
    assert decided(seen).step is not Step.ASK


@pytest.mark.parametrize("seen", ALL)
def test_a_guest_that_moves_runs_only_when_its_source_has_given_it_away(seen: Seen) -> None:
    """Whatever else is known: silence, a lease, or the leave to decide alone."""
    moves = decided(replace(seen, moves=True))

    whole = seen.committed > 0 and seen.final
    assert moves.step is (Step.RUN if whole and (seen.handed_over or seen.person) else Step.WAIT)


def test_why_a_guest_that_moves_is_waited_for_is_said() -> None:
    moves = replace(NO_LEASE, moves=True, silent=SILENT)

    assert decided(moves).why == "the source has not handed the guest over"
    given = replace(moves, final=True, person=True)
    assert decided(given).why == "the controller confirmed the source's handover"
