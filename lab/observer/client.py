"""Start the observer and query it."""

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
    """Start the observer in its namespace; `lab down` kills the processes in all namespaces."""
    program = [sys.executable, "-m", "vmckpt_lab.observer.server"]
    arguments = [plan.observer_address, str(plan.observer_socket)]
    command = in_namespace(plan.observer_namespace, *program, *arguments)
    start_daemon(command, plan.folder / "observer.log")


def ask(control: Path, **question: Any) -> dict[str, Any]:
    """Send a question to the observer and return its answer.

    Raises LabError if the observer does not answer or does not know the guest.
    """
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
    """Return the observer's report on a guest. Raises LabError.

    `since`, `until`: window for the longest silence, in monotonic seconds.
    """
    window = {"since": since, "until": until}
    given = {key: value for key, value in window.items() if value is not None}
    answer = ask(control, op="status", guest=guest, **given)
    verified = answer.pop("verified")
    return View(**answer, verified=messages.Message(**verified) if verified else None)


def answers(plan: LabPlan) -> bool:
    """Return whether the observer answers."""
    try:
        ask(plan.observer_socket, op="guests")
    except LabError:
        return False
    return True


def wait_until_up(plan: LabPlan, *, limit: float = 15.0) -> None:
    """Wait until the observer answers. Raises LabError after `limit` seconds."""
    give_up = Deadline(limit)
    while not answers(plan):
        if give_up.passed():
            log = (plan.folder / "observer.log").read_text(errors="replace").strip()
            last = (log.splitlines() or ["its log is empty"])[-1]
            raise LabError(f"the observer did not start: {last}")
        time.sleep(0.05)


def verify(control: Path, guest: str, *, limit: float = 30.0) -> View:
    """Make a guest check all its memory and disk. Returns the observer's report afterwards.

    Raises LabError if the guest does not answer within `limit` seconds.
    """
    token = ask(control, op="verify", guest=guest)["token"]
    give_up = Deadline(limit)
    while True:
        seen = status(control, guest)
        if seen.verified is not None and seen.verified.token == token:
            return seen
        if give_up.passed():
            raise LabError(f"guest {guest} did not answer a verify request within {limit:g} s")
        time.sleep(0.05)


_PATIENCE = 5.0


class LabObserver:
    """Implements `model.migration.OutsideView` with the lab's observer."""

    def __init__(self, control: Path) -> None:
        self._control = control

    async def blackout(self, guest: str, since: Seconds, until: Seconds) -> Seconds | None:
        """See OutsideView.blackout. Returns None if the observer does not answer.

        A silence that lasts beyond the window is followed for up to `_PATIENCE` seconds.
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
