"""What clients see of a real guest: one copy, whatever moves, ends or restores it."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.bench import Bench, migrate
from tests.lab.protecting import GUEST, SOON, epochs, lab_with_witness, protect, tidied
from vmckpt_lab import host, lab
from vmckpt_lab.history.history import History, Input, Kind, Operation
from vmckpt_lab.history.recorder import Recorder, judge_in_time

SMALL = {"memory": "128MiB", "dirty": "8MiB@10MiB/s", "disk": "8MiB"}


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"h{os.getpid()}") as made:
        yield made


@pytest.fixture
def pair(witnessed: Bench) -> Iterator[Bench]:
    with tidied(witnessed) as made:
        yield made


def answered(known: History, since: float, until: float) -> list[Operation]:
    """Operations that were called and returned in between."""
    return [
        one for one in known.operations
        if one.returned is not None and since <= one.call and one.returned <= until
    ]  # fmt: skip


def test_a_migrated_guest_is_one_and_a_guest_that_is_put_back_is_not(
    bench: Bench, tmp_path: Path
) -> None:
    bench.guest(**SMALL)
    with Recorder(bench.plan, "web1") as recorder:
        recorder.await_answers(100)
        began = time.monotonic()
        assert migrate(bench).json["outcome"] == "completed"
        ended = time.monotonic()
        recorder.await_answers(100)
        moved = recorder.check(tmp_path)
        assert (moved.wrong, moved.unknown) == ((), ())
        assert len(answered(recorder.history(), began, ended)) > 50

        # Saved, run on with, and put back behind the back of its clients.
        saved = f"/var/tmp/history-{os.getpid()}.saved"
        taking = time.monotonic()
        bench.inside("beta", "virsh", "save", "web1", saved)
        bench.inside("beta", "virsh", "restore", saved, "--running")
        taken = time.monotonic()
        recorder.await_answers(100)
        assert recorder.check(tmp_path).wrong == ()
        restoring = time.monotonic()
        bench.inside("beta", "virsh", "destroy", "web1")
        bench.inside("beta", "virsh", "restore", saved, "--running")
        restored = time.monotonic()
        bench.inside("beta", "rm", saved)
        recorder.await_answers(100)
        recorder.stop()
    found = recorder.check(tmp_path)
    assert "is not linearizable: key" in found.wrong[0]
    (kept,) = tmp_path.glob("vmckpt-history-*.jsonl")
    assert str(kept) in found.wrong[0]

    # It is what a restore does.
    recorder.taken("saved", taking, taken)
    recorder.restored("saved", restoring, restored)
    found = recorder.check(tmp_path)
    assert (found.wrong, found.unknown) == ((), ())


@pytest.mark.long
def test_a_failover_after_migrations_is_linearizable_and_one_that_loses_an_answer_is_not(
    pair: Bench, tmp_path: Path
) -> None:
    pair.guest(**GUEST)
    with Recorder(pair.plan, "web1") as recorder:
        for to in ("beta", "alpha"):
            pair.good("migrate", "web1", "--to", to)
        protect(pair)
        epochs(pair)
        recorder.await_answers(50)
        died = time.monotonic()
        host.power_off(pair.plan.host("alpha"))
        recorder.await_answers(200, limit=SOON)
        lab.heal(pair.plan, "alpha")
        pair.good("recover", "--json")
        known = recorder.stop()
    found = recorder.check(tmp_path)
    assert (found.wrong, found.unknown) == ((), ())
    assert list(tmp_path.iterdir()) == []
    before, after = answered(known, 0.0, died), answered(known, died, time.monotonic())
    assert min(len(before), len(after)) >= 50
    assert {one.run for one in before} == {one.run for one in after}

    for broken in (released_early(known, died), answered_from_an_old_epoch(known, died)):
        assert "not linearizable" in judge_in_time(broken).wrong[0]


def released_early(known: History, died: float) -> History:
    """Also has an answer that left before its epoch was committed, and was lost with the host."""
    last = answered(known, 0.0, died)[-1]
    lost = replace(
        last, client=99, call=died - 0.001, returned=died, output=None,
        input=Input(kind=Kind.WRITE, key=last.input.key, value=1 << 60),
    )  # fmt: skip
    return replace(known, operations=(*known.operations, lost))


def answered_from_an_old_epoch(known: History, died: float) -> History:
    """Lets the first read after the failover answer what was overwritten before."""
    late = next(
        one for one in answered(known, died + 1.0, time.monotonic())
        if one.input.kind is Kind.READ and one.output
    )  # fmt: skip
    old = next(
        one.output for one in answered(known, 0.0, died)
        if one.input.key == late.input.key and one.output not in (0, late.output)
    )  # fmt: skip
    stale = replace(late, output=old)
    return replace(
        known, operations=tuple(stale if one is late else one for one in known.operations)
    )
