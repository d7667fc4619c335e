"""A journal is kept small: old samples are thinned, and at last operations forgotten."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.journals import WEB1, Clock, sampled
from vmckpt.journal.records import Record
from vmckpt.journal.sample_thinning import Retention, Step
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

DAY = 86400.0


STEPS = Retention(
    steps=(
        Step(until=Seconds(3600.0), spacing=Seconds(0.0)),
        Step(until=Seconds(7 * DAY), spacing=Seconds(1.0)),
        Step(until=Seconds(90 * DAY), spacing=Seconds(10.0)),
    )
)


def test_old_samples_are_thinned_then_gone_and_at_last_the_operation(
    journal: Journal, clock: Clock
) -> None:
    id_ = journal.begin(WEB1)
    journal.add_samples(id_, sampled(*(n / 5 for n in range(151))))
    journal.add_event(id_, Record(kind="checked", at=Seconds(0.0), values={}))
    active = journal.begin(WEB1)
    journal.add_samples(active, sampled(0.0, 0.2))
    journal.finish(id_, "completed", {"total_ms": 1})
    ended, counts = clock.now, []
    for age in (0.5 * 3600, 2 * 3600, 8 * DAY, 91 * DAY, 366 * DAY):
        clock.now = ended + age
        journal.prune(retention=STEPS)
        counts.append((len(journal.samples(id_)), len(journal.events(id_))))

    assert counts == [(151, 1), (31, 1), (4, 1), (0, 0), (0, 0)]
    assert [one.id for one in journal.operations()] == [active]
    assert len(journal.samples(active)) == 2


def test_pruning_is_done_once_an_hour_and_goes_on_where_its_time_ran_out(
    journal: Journal, clock: Clock
) -> None:
    for _ in range(3):
        journal.finish(journal.begin(WEB1), "completed", None)
    clock.now += 2 * 3600
    first = journal.prune(budget=Seconds(-1.0))
    second = journal.prune()
    third = journal.prune()

    assert first is not None
    assert (first.thinned, first.complete) == (0, False)
    assert second is not None
    assert (second.thinned, second.complete) == (3, True)
    assert third is None


def test_several_may_prune_at_once(journal: Journal, clock: Clock, place: Path | str) -> None:
    for _ in range(6):
        journal.finish(journal.begin(WEB1), "completed", None)
    clock.now += 400 * DAY
    with Journal(place, clock=clock) as other, ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda one: one.prune(budget=Seconds(30.0)), (journal, other)))

    assert any(one is not None for one in done)
    assert journal.operations() == []
