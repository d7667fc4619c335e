"""Record the answers of a lab guest to its clients during a test, and check the history.

`check_runs` decides. Its result depends only on its input and the time limit.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from vmckpt.errors import LabError
from vmckpt_lab import guests
from vmckpt_lab.history import history
from vmckpt_lab.history.history import OPERATOR, History, Input, Kind
from vmckpt_lab.history.key_value import KeyValue
from vmckpt_lab.history.linearizability import NotLinearizable, Unknown, check
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.plan import LabPlan
from vmckpt_lab.shell import in_namespace

TIME = 20.0
"""Time limit for checking a history, in seconds. 10,000 operations take less than a second."""
_ENDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The result of checking a history."""

    answered: int
    """Number of operations that returned."""
    pending: int
    wrong: tuple[str, ...]
    """Why a single copy cannot have given these answers; empty if a single copy can."""
    unknown: tuple[str, ...] = ()
    """Runs that could not be checked within the limits, each with the reason."""


def check_runs(known: History, over: Callable[[], bool]) -> Judgement:
    """Check each of the guest's runs. `over`: returns whether the time limit has passed."""
    wrong = list(known.contradictions)
    if not known.answered:
        wrong.append("no operation was answered")
    unknown = []
    for number, operations in known.runs().items():
        verdict = check(operations, KeyValue(), over)
        if isinstance(verdict, NotLinearizable):
            wrong.append(f"run {number:016x} is not linearizable: {verdict}")
        elif isinstance(verdict, Unknown):
            unknown.append(f"run {number:016x}, {verdict.part}: {verdict.why}")
    return Judgement(
        answered=known.answered,
        pending=known.pending,
        wrong=tuple(f"history: {one}" for one in wrong),
        unknown=tuple(unknown),
    )


def judge_in_time(known: History) -> Judgement:
    """Check each of the guest's runs within `TIME`, which a slow machine extends."""
    return check_runs(known, Deadline(TIME).passed)


def keep(recording: Iterable[str], folder: Path) -> Path:
    """Write a recording's lines to a new file in `folder`. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=folder, prefix="vmckpt-history-", suffix=".jsonl", delete=False
    ) as file:
        file.writelines(recording)
    return Path(file.name)


class Recorder:
    """Runs clients that use a guest's key-value store. Use as a context manager, once.

    Entering the context waits for the first answer to a client. Raises LabError if none arrives.

    The recording is in `file`. `taken` and `restored` add the operator's snapshots and restores.
    """

    def __init__(
        self, plan: LabPlan, guest: str, *, clients: int = 8, keys: int = 4, seed: int = 0
    ) -> None:
        self._plan, self._guest = plan, guest
        self._counts = ("--clients", str(clients), "--keys", str(keys), "--seed", str(seed))
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: list[str] = []
        self.file = plan.folder / f"history-{guest}.jsonl"
        self._log = plan.folder / f"history-{guest}.log"

    def __enter__(self) -> "Recorder":
        address = guests.find(self._plan, self._guest).address
        program = [sys.executable, "-m", "vmckpt_lab.history.clients"]
        command = in_namespace(
            self._plan.observer_namespace, *program, address, str(self.file), *self._counts
        )
        self.file.unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self.await_answers(1)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> History:
        """Stop the clients and return the history. Raises LabError if the clients have failed."""
        process = self._process
        if process is None:
            raise LabError(f"the clients of guest {self._guest} were not started")
        if process.poll() is None:
            process.terminate()
        try:
            code = process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != 0:
            said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise LabError(f"the clients of guest {self._guest} exited with {code}: {said}")
        return self.history()

    def history(self) -> History:
        """Return the history recorded so far."""
        return history.parse(self._recording())

    def _recording(self) -> list[str]:
        try:
            with self.file.open() as file:
                return [*self._orders, *file]
        except FileNotFoundError:
            return self._orders

    def check(self, folder: Path) -> Judgement:
        """Check the history recorded so far. A wrong history is saved to a file in `folder`."""
        recording = self._recording()
        found = judge_in_time(history.parse(recording))
        if not found.wrong:
            return found
        kept = f"\nThe history was saved to {keep(recording, folder)}."
        return replace(found, wrong=tuple(f"{one}{kept}" for one in found.wrong))

    def await_answers(self, count: int, *, limit: float = 60.0) -> None:
        """Wait until `count` more operations have returned.

        Raises LabError after `limit` seconds.
        """
        give_up, before = Deadline(limit), self.history().answered
        while (now := self.history().answered) < before + count:
            if give_up.passed():
                raise LabError(
                    f"the clients of guest {self._guest} received only {now - before} answers in"
                    f" {limit:g} s"
                )
            time.sleep(0.2)

    def taken(self, snapshot: str, began: float, ended: float) -> None:
        """Record that a snapshot was taken between two times, in monotonic seconds."""
        self._order(Input(kind=Kind.SNAPSHOT, snapshot=snapshot), began, ended)

    def restored(self, snapshot: str, began: float, ended: float | None) -> None:
        """Record that the guest was restored between two times, in monotonic seconds.

        `ended`: None if the restore may also have happened later, or never.
        """
        self._order(Input(kind=Kind.RESTORE, snapshot=snapshot), began, ended)

    def _order(self, asked: Input, began: float, ended: float | None) -> None:
        sequence = len(self._orders) + 1
        self._orders.append(history.call_line(OPERATOR, sequence, asked, began))
        if ended is not None:
            self._orders.append(history.return_line(OPERATOR, sequence, ended))
