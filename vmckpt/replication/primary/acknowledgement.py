"""Wait for the acknowledgement of an epoch, and read the backup's status reports."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.messages import Ack, End, Heartbeat, PeerRefused
from vmckpt.replication.status import PrimaryStatus
from vmckpt.units import Seconds

_LOOK = Seconds(0.1)


def await_ack(
    line: PeerConnection, number: int, status: PrimaryStatus, *, patience: Seconds,
    meanwhile: Callable[[], None],
) -> None:  # fmt: skip
    """Wait for the acknowledgement of an epoch while the backup receives data, however slowly.

    `patience`: how long to wait while the backup receives nothing. `meanwhile` is called at least
    every 0.1 s. Raises ConnectionLost, WireError, and any exception that `meanwhile` raises.
    """
    taken, since = -1, time.monotonic()
    while True:
        meanwhile()
        found = line.receive(_LOOK)
        if isinstance(found, Ack) and found.epoch == number:
            return
        if isinstance(found, Heartbeat):
            told = note(found)
            status.heard(told)
            much = told.get("received")
            if isinstance(much, int) and taken < much <= line.sent:
                taken, since = much, time.monotonic()
        elif isinstance(found, PeerRefused | End):
            raise ConnectionLost(f"the backup refused to continue: {found.why}")
        elif found is not None:
            raise ConnectionLost(
                f"the backup sent {type(found).__name__}, not the acknowledgement of epoch {number}"
            )
        if time.monotonic() - since > patience:
            raise ConnectionLost(f"the backup has received nothing for {patience:g} s")


def note(beat: Heartbeat) -> Mapping[str, Any]:
    """Parse the status report in a heartbeat. Raises ConnectionLost if it is invalid."""
    try:
        told = json.loads(beat.note or b"{}")
    except (ValueError, RecursionError) as exc:
        raise ConnectionLost(f"the backup's status report is not JSON: {exc}") from exc
    if not isinstance(told, dict):
        raise ConnectionLost("the backup's status report is not a JSON object")
    return told
