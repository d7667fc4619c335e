"""Run all mutations: first the tests without a mutation, then with each mutation."""

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
"""Time limit of tests with a mutation, as a multiple of their time without a mutation."""
LEAST = 30.0
"""Minimum time limit of tests with a mutation, in seconds."""
LONGEST = 300.0
"""Time limit of tests without a mutation, in seconds."""
_FAILED, _PASSED = 1, 0


class Verdict(StrEnum):
    """The result of a mutation."""

    CAUGHT = "caught"
    """A test failed twice with the mutation, and passed without it."""
    HANGS = "hangs"
    """As `CAUGHT`, but the tests exceeded their time limit instead of failing."""
    SURVIVED = "SURVIVED"
    LUCK = "BY LUCK"
    """A test failed with the mutation, but when repeated it passed, or failed without it."""
    BROKEN = "BROKEN"
    """The tests could not start with the mutation, which therefore proves nothing."""
    UNFIT = "UNFIT"
    """The tests fail without the mutation, and therefore prove nothing."""


GOOD = (Verdict.CAUGHT, Verdict.HANGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A mutation and its result."""

    mutation: Mutation
    verdict: Verdict
    by: str
    """The ID of the test that failed, or the last line of output if no test failed."""
    seconds: float


def to_be_confirmed(first: Run) -> bool:
    """Return whether a run detected the mutation, so that it must be confirmed. Pure."""
    return first.code is None or (first.code == _FAILED and first.test is not None)


def judge(first: Run, again: Run | None, without: Run | None) -> Verdict:
    """Return the verdict on a mutation. Pure.

    `again`, `without`: repetitions with and without the mutation, of the test that failed, or of
    all tests if they hung. None: no repetition was needed.
    """
    if again is None or without is None:
        return Verdict.SURVIVED if first.code == _PASSED else Verdict.BROKEN
    if again.code != first.code or without.code != _PASSED:
        return Verdict.LUCK
    return Verdict.HANGS if first.code is None else Verdict.CAUGHT


def limit_for(unmutated: Run) -> float:
    """Return the time limit of tests with a mutation, in seconds. Pure."""
    return max(LEAST, FAR * unmutated.seconds)


def try_all(
    table: Sequence[Mutation], root: Path, processes: int, tell: Callable[[str], None],
    done: Callable[[Outcome], None],
) -> list[Outcome]:  # fmt: skip
    """Try each mutation. Returns the results in the table's order.

    `done` is called with each result as soon as it is known. Raises OutOfDate, WrongCode. Leaves no
    process or file behind, even after KeyboardInterrupt.
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
    """Call `work` for each thing, concurrently in all copies. Returns the results."""
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
    """Run a suite without a mutation, twice if it fails: on a busy machine, a test may time out."""
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
