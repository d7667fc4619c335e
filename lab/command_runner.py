"""Run vmckpt commands as processes and follow their progress, so that faults can be timed."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vmckpt.errors import LabError
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.plan import LabPlan

PROGRAM = (sys.executable, "-m", "vmckpt.cli.app")
_PHASE = re.compile(r"s phase=(\S+)")
_PASS = re.compile(r" iteration=(\d+)")


class Moment(StrEnum):
    """A phase of a migration in which a fault can be injected."""

    PREFLIGHT = "preflight"
    SETUP = "setup"
    FIRST = "first-pass"
    LATE = "late-pass"
    SWITCHOVER = "switchover"
    POST_COPY = "post-copy"
    CLEANUP = "cleanup"


LATE = 3
"""The first pass that counts as late."""
_PHASES = {
    Moment.PREFLIGHT: "preflight",
    Moment.SETUP: "setup",
    Moment.FIRST: "pre-copy",
    Moment.LATE: "pre-copy",
    Moment.SWITCHOVER: "switchover",
    Moment.POST_COPY: "post-copy",
    Moment.CLEANUP: "cleanup",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """A controller's latest progress report."""

    phase: str = ""
    iteration: int = 0

    def after(self, line: str) -> "Progress":
        phase, passed = _PHASE.search(line), _PASS.search(line)
        return Progress(
            phase=phase[1] if phase else self.phase,
            iteration=int(passed[1]) if passed else self.iteration,
        )

    def is_at(self, moment: Moment) -> bool:
        late = self.iteration >= LATE
        if moment in (Moment.FIRST, Moment.LATE) and late != (moment is Moment.LATE):
            return False
        return self.phase == _PHASES[moment]


@dataclass(frozen=True, slots=True)
class End:
    """The result of a command that has exited."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """The command's JSON output. A list is under the key "all". Empty if there is no JSON."""
        try:
            told = json.loads(self.out)
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {"all": told}

    @property
    def outcome(self) -> str | None:
        outcome = self.report.get("outcome")
        return None if outcome is None else str(outcome)

    @property
    def said(self) -> str:
        """The outcome that the command reported; the exit code if it reported none."""
        return self.outcome or f"exit code {self.code}"

    @property
    def last_words(self) -> str:
        return (self.err.strip().splitlines() or ["the command printed nothing"])[-1]


def environment(plan: LabPlan, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a vmckpt command, with its journal in the lab's directory.

    `more`: further variables, which override the others.
    """
    return {
        **os.environ,
        "VMCKPT_INVENTORY": str(plan.inventory),
        "VMCKPT_STATE": str(plan.folder / "state"),
        **(more or {}),
    }


class Controller:
    """A running vmckpt command, and the progress that it reports."""

    def __init__(self, plan: LabPlan, *args: str, more: Mapping[str, str] | None = None) -> None:
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._progress = Progress()
        self._process = subprocess.Popen(
            [*PROGRAM, *args],
            env=environment(plan, more),
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._out, self._words = "", args
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._follow, self._keep)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                with self._changed:
                    self._lines.append(line)
                    self._progress = self._progress.after(line)
                    self._changed.notify_all()

    def _keep(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            self._out = out.read()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def is_at(self, moment: Moment) -> bool:
        """Return whether the command is running and last reported this phase."""
        with self._changed:
            return self.running and self._progress.is_at(moment)

    def reach(self, moment: Moment, *, limit: float) -> bool:
        """Wait until the command reports this phase.

        Returns False if the command exits first, or after `limit` seconds.
        """
        give_up = Deadline(limit)
        with self._changed:
            while not self._progress.is_at(moment):
                if not self.running or give_up.passed():
                    return False
                self._changed.wait(0.05)
        return True

    def kill(self) -> bool:
        """Send SIGKILL. Returns whether the command was still running."""
        was = self.running
        self._process.kill()
        return was and self._process.wait(10) < 0

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self._process.send_signal(2)

    def end(self, *, limit: float) -> End:
        """Wait until the command exits.

        Kills the command and raises LabError if it does not exit within `limit` seconds.
        """
        give_up, code = Deadline(limit), None
        while code is None and not give_up.passed():
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0.5)
        if code is None:
            self._process.kill()
            self._process.wait()
            last = "".join(self._lines[-8:])
            words = " ".join(self._words)
            raise LabError(f"vmckpt {words} did not exit within {limit:g} s; last output:\n{last}")
        for thread in self._threads:
            thread.join(10)
        return End(code, self._out, "".join(self._lines))


def run(
    plan: LabPlan, *args: str, limit: float = 60.0, more: Mapping[str, str] | None = None
) -> End:
    """Run a vmckpt command. Raises LabError if it does not exit within `limit` seconds."""
    return Controller(plan, *args, more=more).end(limit=limit)
