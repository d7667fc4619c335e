"""Runs all mutations: first the tests without any, then each mutation in a copy of its own."""

import queue
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from bench.mutations.mutation import Mutation, Suite
from bench.mutations.scratch import Copy, Run

T = TypeVar("T")
U = TypeVar("U")

FAR = 6.0
"""So many times as long as without a mutation the tests may take before they count as hanging."""
LEAST = 30.0
"""Seconds that they have in any case."""
LONGEST = 300.0
"""Seconds for tests without a mutation."""
_FAILED, _PASSED = 1, 0


class Verdict(StrEnum):
    """What became of a mutation."""

    CAUGHT = "caught"
    """A test failed with it, twice, and passed without it."""
    HANGS = "hangs"
    """As `CAUGHT`; the tests did not end in many times what they take without it."""
    SURVIVED = "SURVIVED"
    LUCK = "BY LUCK"
    """A test failed with it, and passed with it or failed without it when it was run again."""
    BROKEN = "BROKEN"
    """The tests could not begin with it: it proves nothing."""
    UNFIT = "UNFIT"
    """The tests fail without it: they prove nothing."""


GOOD = (Verdict.CAUGHT, Verdict.HANGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One mutation and what became of it."""

    mutation: Mutation
    verdict: Verdict
    by: str
    """The ID of the test that failed; else what the tests last said."""
    seconds: float


def to_be_confirmed(first: Run) -> bool:
    """Whether a run says that the mutation was noticed. Pure."""
    return first.code is None or (first.code == _FAILED and first.test is not None)


def judge(first: Run, again: Run | None, without: Run | None) -> Verdict:
    """Pure. Of what is to be confirmed: the test that failed, or all if they hung, run `again` with
    the mutation and then `without` it."""
    if again is None or without is None:
        return Verdict.SURVIVED if first.code == _PASSED else Verdict.BROKEN
    if again.code != first.code or without.code != _PASSED:
        return Verdict.LUCK
    return Verdict.HANGS if first.code is None else Verdict.CAUGHT


def limit_for(unmutated: Run) -> float:
    """Seconds after which tests with a mutation count as hanging. Pure."""
    return max(LEAST, FAR * unmutated.seconds)


def try_all(
    table: Sequence[Mutation], root: Path, processes: int, tell: Callable[[str], None],
    done: Callable[[Outcome], None],
) -> list[Outcome]:  # fmt: skip
    """Try each mutation; `done` is called with each as it ends. In the table's order.

    Raises OutOfDate, WrongCode. Nothing is left behind, also after KeyboardInterrupt.
    """
    folder = Path(tempfile.mkdtemp(prefix="vmckpt-mut-"))
    try:
        folder.chmod(0o711)
        copies = [Copy(root, folder / str(number)) for number in range(processes)]
        suites = list(dict.fromkeys(one.suite for one in table))
        tell(f"{len(suites)} sets of tests without a mutation")
        runs = dict(_each(copies, suites, _unmutated, lambda _: None))
        tell(f"{len(table)} mutations")
        found = _each(copies, table, lambda copy, one: _tried(copy, one, runs[one.suite]), done)
        order = {one.name: number for number, one in enumerate(table)}
        return sorted(found, key=lambda one: order[one.mutation.name])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _each(
    copies: Sequence[Copy], things: Iterable[T], work: Callable[[Copy, T], U],
    done: Callable[[U], None],
) -> list[U]:  # fmt: skip
    """Do that with all of them, as many at a time as there are copies."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(thing: T) -> U:
        copy = free.get()
        try:
            return work(copy, thing)
        finally:
            free.put(copy)

    found = []
    with ThreadPoolExecutor(len(copies)) as pool:
        futures = [pool.submit(one, thing) for thing in things]
        try:
            for future in as_completed(futures):
                found.append(future.result())
                done(found[-1])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise
    return found


def _unmutated(copy: Copy, suite: Suite) -> tuple[Suite, Run]:
    """Twice, if need be: on a busy machine a test may wait in vain."""
    run = copy.run(suite, LONGEST)
    return suite, run if run.code == _PASSED else copy.run(suite, LONGEST)


def _tried(copy: Copy, mutation: Mutation, unmutated: Run) -> Outcome:
    if unmutated.code != _PASSED:
        return _outcome(mutation, Verdict.UNFIT, unmutated)
    limit = limit_for(unmutated)
    again = without = None
    with copy.broken(mutation):
        first = copy.run(mutation.suite, limit)
        only = None if first.code is None else first.test
        if to_be_confirmed(first):
            again = copy.run(mutation.suite, limit, only=only)
    if again is not None:
        without = copy.run(mutation.suite, limit, only=only)
    return _outcome(mutation, judge(first, again, without), first)


def _outcome(mutation: Mutation, verdict: Verdict, run: Run) -> Outcome:
    by = run.test or (run.output.strip().splitlines() or ["no output"])[-1]
    return Outcome(mutation=mutation, verdict=verdict, by=by, seconds=run.seconds)
