"""What is true of an interrupted migration, and what may be done: every pair of answers."""

import itertools

import pytest

from tests.support import recovery_table
from tests.support.recovery_table import decided
from vmckpt.migration.recovery import decide
from vmckpt.migration.recovery.decide import Act, Seen
from vmckpt.model.migration import Outcome

PAIRS = list(itertools.product(Seen, Seen))
MAY_RUN = (Seen.RUNS, Seen.PAUSED, Seen.IN_TWO, Seen.MOVING, Seen.SILENT)


def test_the_document_has_the_table_that_is_used() -> None:
    assert recovery_table.table() in recovery_table.DOCUMENT.read_text()


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_no_copy_is_ended_that_runs_or_may_have_run(here: Seen, there: Seen) -> None:
    acts = decided(here, there).acts

    if Act.END_TARGET in acts:
        assert there is Seen.HELD
    if Act.END_SOURCE in acts:
        assert (here, there) == (Seen.HELD, Seen.RUNS)


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_none_is_started_beside_one_that_may_run(here: Seen, there: Seen) -> None:
    acts = decided(here, there).acts

    if Act.START_SOURCE in acts:
        assert here is Seen.HELD
        assert there not in MAY_RUN
        assert there is Seen.NONE or acts.index(Act.END_TARGET) < acts.index(Act.START_SOURCE)


@pytest.mark.parametrize("there", Seen)
@pytest.mark.parametrize("ordered", [True, False])
def test_nothing_is_touched_while_a_host_is_silent(there: Seen, *, ordered: bool) -> None:
    if there is Seen.RUNS and not ordered:
        return  # below
    for verdict in (
        decided(Seen.SILENT, there, ordered=ordered),
        decided(there, Seen.SILENT, ordered=ordered),
    ):
        assert (verdict.outcome, verdict.acts) == (None, ())
        assert "vmckpt recover" in verdict.settle


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_what_is_not_settled_says_what_would_settle_it(here: Seen, there: Seen) -> None:
    verdict = decided(here, there)

    assert verdict.known or verdict.settle


@pytest.mark.parametrize("here", Seen)
def test_a_target_that_lacks_a_page_need_not_be_waited_for_if_the_guest_runs(here: Seen) -> None:
    """No copy there can ever run, whatever it says once it answers again."""
    verdict = decided(here, Seen.SILENT, sent_all=False)
    runs = here is Seen.RUNS
    assert (verdict.outcome, verdict.acts) == (
        (Outcome.FAILED, (Act.UNDO,)) if runs else (None, ())
    )
    assert decided(here, Seen.SILENT).outcome is None
    assert decided(Seen.SILENT, here, sent_all=False).outcome is None


def test_a_guest_that_never_began_to_move_is_not_kept_by_a_silent_target() -> None:
    assert decided(Seen.RUNS, Seen.SILENT, ordered=False) is decide.NEVER


def test_what_libvirt_was_never_told_has_not_moved() -> None:
    verdict = decided(Seen.RUNS, Seen.NONE, ordered=False)

    assert (verdict.outcome, verdict.acts) == (Outcome.FAILED, (Act.UNDO,))


def test_a_guest_that_we_paused_goes_on() -> None:
    assert Act.START_SOURCE in decided(Seen.PAUSED, Seen.NONE, paused=True).acts
    assert Act.START_SOURCE not in decided(Seen.PAUSED, Seen.NONE).acts


def test_memory_that_may_be_older_than_the_disks_does_not_go_on() -> None:
    verdict = decided(Seen.HELD, Seen.NONE, may_have_run=True)

    assert (verdict.outcome, verdict.acts) == (Outcome.LOST, ())


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_third_copy_is_for_a_person(here: Seen, there: Seen) -> None:
    verdict = decided(here, there, elsewhere=["gamma"])

    assert verdict.acts == ()
    if here is there is Seen.NONE:
        assert verdict.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("outcome", "acts"),
    [
        (Outcome.COMPLETED, (Act.FINISH,)),
        (Outcome.CANCELLED, (Act.UNDO,)),
        (Outcome.NOT_CONVERGED, (Act.UNDO,)),
        (Outcome.POST_COPY_PAUSED, ()),
        (Outcome.UNKNOWN, ()),
        (Outcome.LOST, ()),
    ],
)
def test_after_a_migration_that_went_on(outcome: Outcome, acts: tuple[Act, ...]) -> None:
    assert decide.after(outcome) == acts
