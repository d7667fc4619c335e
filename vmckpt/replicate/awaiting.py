"""Waiting for the backup's word on an epoch."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from vmckpt.replicate.link import Cut, Line
from vmckpt.replicate.status import PrimaryStatus
from vmckpt.replicate.wire import Ack, Beat, End, Refused
from vmckpt.units import Seconds

_LOOK = Seconds(0.1)


def await_ack(
    line: Line, number: int, status: PrimaryStatus, *, patience: Seconds,
    meanwhile: Callable[[], None],
) -> None:  # fmt: skip
    """As long as the backup takes what was sent, however slowly. Raises Cut, WireError, and what
    `meanwhile` raises, which is called every now and then."""
    taken, since = -1, time.monotonic()
    while True:
        meanwhile()
        found = line.receive(_LOOK)
        if isinstance(found, Ack) and found.epoch == number:
            return
        if isinstance(found, Beat):
            told = note(found)
            status.heard(told)
            much = told.get("received")
            if isinstance(much, int) and taken < much <= line.sent:
                taken, since = much, time.monotonic()
        elif isinstance(found, Refused | End):
            raise Cut(f"the backup will not go on: {found.why}")
        elif found is not None:
            raise Cut(f"the backup sends {type(found).__name__}, and no acknowledgement")
        if time.monotonic() - since > patience:
            raise Cut(f"the backup has taken nothing for {patience:g} s")


def note(beat: Beat) -> Mapping[str, Any]:
    """What the backup tells of itself. Raises Cut if it makes no sense."""
    try:
        told = json.loads(beat.note or b"{}")
    except (ValueError, RecursionError) as exc:
        raise Cut(f"the backup's note is no JSON: {exc}") from exc
    if not isinstance(told, dict):
        raise Cut("the backup's note is no object")
    return told
