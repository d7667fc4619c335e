"""Start the observer and ask it what it saw."""

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

from vmckpt.errors import LabError
from vmckpt.units import Seconds
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.observer import messages
from vmckpt_lab.observer.analysis import View
from vmckpt_lab.plan import LabPlan
from vmckpt_lab.shell import in_namespace, start_daemon


def start(plan: LabPlan) -> None:
    """Start the observer's process in its namespace; `lab down` ends it with the namespace."""
    program = [sys.executable, "-m", "vmckpt_lab.observer.server"]
    arguments = [plan.observer_address, str(plan.observer_socket)]
    command = in_namespace(plan.observer_namespace, *program, *arguments)
    start_daemon(command, plan.folder / "observer.log")


def ask(control: Path, **question: Any) -> dict[str, Any]:
    """One question, one answer; LabError if the observer is gone or knows no such guest."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5.0)
        try:
            connection.connect(str(control))
            connection.sendall(json.dumps(question).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
        except (OSError, ValueError) as exc:
            raise LabError(f"the observer at {control} does not answer: {exc}") from exc
    if "error" in answer:
        raise LabError(str(answer["error"]))
    return answer


def status(
    control: Path, guest: str, *, since: float | None = None, until: float | None = None
) -> View:
    """What the observer knows of a guest; its longest silence in a window of monotonic time."""
    window = {"since": since, "until": until}
    given = {key: value for key, value in window.items() if value is not None}
    answer = ask(control, op="status", guest=guest, **given)
    verified = answer.pop("verified")
    return View(**answer, verified=messages.Message(**verified) if verified else None)


def answers(plan: LabPlan) -> bool:
    """Whether the observer lives."""
    try:
        ask(plan.observer_socket, op="guests")
    except LabError:
        return False
    return True


def wait_until_up(plan: LabPlan, *, limit: float = 15.0) -> None:
    """Return when the observer answers."""
    give_up = Deadline(limit)
    while not answers(plan):
        if give_up.passed():
            log = (plan.folder / "observer.log").read_text(errors="replace").strip()
            raise LabError(f"the observer did not start: {log.splitlines()[-1:] or 'no log'}")
        time.sleep(0.05)


def verify(control: Path, guest: str, *, limit: float = 30.0) -> View:
    """Ask the guest to check all its memory and disk; what the observer knows afterwards.

    Raises LabError if the guest gives no answer in `limit` seconds.
    """
    token = ask(control, op="verify", guest=guest)["token"]
    give_up = Deadline(limit)
    while True:
        seen = status(control, guest)
        if seen.verified is not None and seen.verified.token == token:
            return seen
        if give_up.passed():
            raise LabError(f"guest {guest} did not answer a verify in {limit:g} s")
        time.sleep(0.05)


_PATIENCE = 5.0


class LabObserver:
    """The observer as the port `model.migration.OutsideView`."""

    def __init__(self, control: Path) -> None:
        self._control = control

    async def blackout(self, guest: str, since: Seconds, until: Seconds) -> Seconds | None:
        """See OutsideView.blackout; an observer that is gone watched nothing.

        A silence that is not over at the end of the window is followed, for `_PATIENCE` at most.
        """
        give_up = until + _PATIENCE
        try:
            while True:
                now = time.monotonic()
                seen = await asyncio.to_thread(status, self._control, guest, since=since, until=now)
                if (seen.answered_at or 0.0) > until or now > give_up:
                    return Seconds(seen.blackout)
                await asyncio.sleep(0.02)
        except LabError:
            return None
