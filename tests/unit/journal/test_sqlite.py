"""Several processes that want the same guest: one at a time, and each knows when it is over."""

import subprocess
import sys
import time
from pathlib import Path

from tests.support.paths import ROOT
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

# Each acts alone if its token is the greatest that was ever seen and nobody else has the file.
CONTENDER = """
import os, sys, time
from pathlib import Path
from vmckpt.errors import GuestLocked, LeaseLost
from vmckpt.journal.records import NewOperation, StepState
from vmckpt.journal.store import Journal

place, folder, turns = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
place = place if "://" in place else Path(place)
with Journal(place, busy=20.0) as journal:
    id_ = journal.begin(NewOperation(kind="migrate", guest="web1", guest_uuid="u-1"))
    print("ready", flush=True)
    sys.stdin.readline()
    done = 0
    while done < turns:
        try:
            fence = journal.acquire(id_, "guest/u-1")
        except GuestLocked:
            time.sleep(0.002)
            continue
        step = journal.intend(id_, "act", {}, fence)
        os.close(os.open(folder / "acting", os.O_CREAT | os.O_EXCL))
        seen = sorted(int(one.name) for one in (folder / "tokens").iterdir())
        (folder / "tokens" / str(fence.token)).touch(exist_ok=False)
        assert not seen or seen[-1] < fence.token, (seen[-1], fence.token)
        os.unlink(folder / "acting")
        journal.conclude(id_, step, StepState.DONE, {}, fence)
        journal.release(fence)
        try:
            journal.intend(id_, "act", {}, fence)
        except LeaseLost:
            done += 1
    print("done", flush=True)
"""


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _say(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def contenders(place: Path | str, folder: Path, count: int, turns: int) -> list[str]:
    """Let them contend; what each says at the end."""
    (folder / "tokens").mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(place), str(folder), str(turns)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, cwd=ROOT,
        )
        for _ in range(count)
    ]  # fmt: skip
    said = [_line(one) for one in started]
    for one in started:
        _say(one)
    return [
        first + one.communicate(timeout=120)[0] for first, one in zip(said, started, strict=True)
    ]


def test_exactly_one_acts_at_a_time_and_tokens_grow(place: Path | str, tmp_path: Path) -> None:
    said = contenders(place, tmp_path, count=3, turns=12)

    assert said == ["ready\ndone\n"] * 3
    assert len(list((tmp_path / "tokens").iterdir())) == 36
    with Journal(place) as journal:
        steps = sum(len(journal.steps(one.id)) for one in journal.operations())
        assert steps == 36  # those that came too late were not written


TAKER = """
import sys
from pathlib import Path
from vmckpt.errors import GuestLocked
from vmckpt.journal.store import Journal

place = sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1])
with Journal(place, busy=20.0) as journal:
    [found] = journal.abandoned()
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        print("token", journal.take_over(found).token, flush=True)
    except GuestLocked:
        print("busy", flush=True)
    sys.stdin.readline()
"""


def test_of_several_that_take_an_operation_over_one_gets_it(place: Path | str) -> None:
    program = (
        "import sys; from pathlib import Path; from vmckpt.journal.records import NewOperation\n"
        "from vmckpt.journal.store import Journal\n"
        "place = sys.argv[1] if '://' in sys.argv[1] else Path(sys.argv[1])\n"
        "with Journal(place) as j:\n"
        "    id_ = j.begin(NewOperation(kind='migrate', guest='web1', guest_uuid='u-1'))\n"
        "    j.acquire(id_, 'guest/u-1')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(place)], check=True)
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", TAKER, str(place)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    assert [_line(one) for one in takers] == ["ready\n"] * 3
    for one in takers:
        _say(one)
    said = [_line(one) for one in takers]
    for one in takers:
        one.communicate("\n", timeout=30)

    assert sorted(said) == ["busy\n"] * 2 + ["token 2\n"]


def test_ids_are_unique_among_processes(place: Path | str) -> None:
    program = (
        "import sys; from pathlib import Path; from vmckpt.journal import store\n"
        "from vmckpt.journal.records import NewOperation\n"
        "store._LETTERS = 'ab'\n"
        "place = sys.argv[1] if '://' in sys.argv[1] else Path(sys.argv[1])\n"
        "with store.Journal(place, busy=20.0) as j:\n"
        "    for _ in range(10): j.begin(NewOperation(kind='migrate', guest='web1'))\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", program, str(place)]) for _ in range(4)]
    assert [one.wait(60) for one in started] == [0] * 4
    with Journal(place) as journal:
        assert len(journal.operations()) == 40


def test_a_request_is_taken_by_one_of_several(place: Path | str) -> None:
    program = (
        "import sys; from pathlib import Path; from vmckpt.journal.store import Journal\n"
        "place = sys.argv[1] if '://' in sys.argv[1] else Path(sys.argv[1])\n"
        "with Journal(place, busy=20.0) as j:\n"
        "    id_, taken = sys.argv[2], 0\n"
        "    while j.operation(id_).active: taken += len(j.take_requests(id_))\n"
        "    print(taken)\n"
    )
    with Journal(place, busy=Seconds(20.0)) as journal:
        id_ = journal.begin(NewOperation(kind="migrate", guest="web1"))
        takers = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(place), id_],
                stdout=subprocess.PIPE, text=True,
            )
            for _ in range(3)
        ]  # fmt: skip
        withdrawn = sum(journal.withdraw(journal.ask(id_, "pause", {}, "eve")) for _ in range(100))
        for _ in range(100):
            journal.ask(id_, "pause", {}, "eve")
        until = time.monotonic() + 30
        while journal.requests(id_)[-1].taken_at is None:
            assert time.monotonic() < until
        journal.finish(id_, "completed", None)
        taken = sum(int(one.communicate(timeout=60)[0]) for one in takers)

    assert taken + withdrawn == 200
