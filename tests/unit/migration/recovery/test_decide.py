"""What is true of an interrupted migration, and what may be done: every pair of answers."""

import itertools

import pytest

from tests.support import recovery_table
from tests.support.recovery_table import decided
from vmckpt.migration.recovery import decide
from vmckpt.migration.recovery.decide import HostView, RecoveryAction
from vmckpt.model.migration import Outcome

PAIRS = list(itertools.product(HostView, HostView))
MAY_RUN = (HostView.RUNS, HostView.PAUSED, HostView.IN_TWO, HostView.MOVING, HostView.SILENT)


def test_the_document_has_the_table_that_is_used() -> None:
    assert recovery_table.table() in recovery_table.DOCUMENT.read_text()


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_no_copy_is_ended_that_runs_or_may_have_run(here: HostView, there: HostView) -> None:
    acts = decided(here, there).acts

    if RecoveryAction.END_TARGET in acts:
        assert there is HostView.HELD
    if RecoveryAction.END_SOURCE in acts:
        assert (here, there) == (HostView.HELD, HostView.RUNS)


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_none_is_started_beside_one_that_may_run(here: HostView, there: HostView) -> None:
    acts = decided(here, there).acts

    if RecoveryAction.START_SOURCE in acts:
        assert here is HostView.HELD
        assert there not in MAY_RUN
        assert there is HostView.NONE or acts.index(RecoveryAction.END_TARGET) < acts.index(
            RecoveryAction.START_SOURCE
        )


@pytest.mark.parametrize("there", HostView)
@pytest.mark.parametrize("ordered", [True, False])
def test_nothing_is_touched_while_a_host_is_silent(there: HostView, *, ordered: bool) -> None:
    if there is HostView.RUNS and not ordered:
        return  # below
    for verdict in (
        decided(HostView.SILENT, there, ordered=ordered),
        decided(there, HostView.SILENT, ordered=ordered),
    ):
        assert (verdict.outcome, verdict.acts) == (None, ())
        assert "vmckpt recover" in verdict.settle


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_what_is_not_settled_says_what_would_settle_it(here: HostView, there: HostView) -> None:
    verdict = decided(here, there)

    assert verdict.known or verdict.settle


@pytest.mark.parametrize("here", HostView)
def test_a_target_that_lacks_a_page_need_not_be_waited_for_if_the_guest_runs(
    here: HostView,
) -> None:
    """No copy there can ever run, whatever it says once it answers again."""
    verdict = decided(here, HostView.SILENT, sent_all=False)
    runs = here is HostView.RUNS
    assert (verdict.outcome, verdict.acts) == (
        (Outcome.FAILED, (RecoveryAction.UNDO,)) if runs else (None, ())
    )
    assert decided(here, HostView.SILENT).outcome is None
    assert decided(HostView.SILENT, here, sent_all=False).outcome is None


def test_a_guest_that_never_began_to_move_is_not_kept_by_a_silent_target() -> None:
    assert decided(HostView.RUNS, HostView.SILENT, ordered=False) is decide.NEVER


def test_what_libvirt_was_never_told_has_not_moved() -> None:
    verdict = decided(HostView.RUNS, HostView.NONE, ordered=False)

    assert (verdict.outcome, verdict.acts) == (Outcome.FAILED, (RecoveryAction.UNDO,))


def test_a_guest_that_we_paused_goes_on() -> None:
    assert RecoveryAction.START_SOURCE in decided(HostView.PAUSED, HostView.NONE, paused=True).acts
    assert RecoveryAction.START_SOURCE not in decided(HostView.PAUSED, HostView.NONE).acts


def test_memory_that_may_be_older_than_the_disks_does_not_go_on() -> None:
    verdict = decided(HostView.HELD, HostView.NONE, may_have_run=True)

    assert (verdict.outcome, verdict.acts) == (Outcome.LOST, ())


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_third_copy_is_for_a_person(here: HostView, there: HostView) -> None:
    verdict = decided(here, there, elsewhere=["gamma"])

    assert verdict.acts == ()
    if here is there is HostView.NONE:
        assert verdict.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("outcome", "acts"),
    [
        (Outcome.COMPLETED, (RecoveryAction.FINISH,)),
        (Outcome.CANCELLED, (RecoveryAction.UNDO,)),
        (Outcome.NOT_CONVERGED, (RecoveryAction.UNDO,)),
        (Outcome.POST_COPY_PAUSED, ()),
        (Outcome.UNKNOWN, ()),
        (Outcome.LOST, ()),
    ],
)
def test_after_a_migration_that_went_on(outcome: Outcome, acts: tuple[RecoveryAction, ...]) -> None:
    assert decide.after(outcome) == acts
