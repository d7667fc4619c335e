"""Move a guest's parent state from its previous host to its current host.

The sending agent sends pieces to the controller, and the receiving agent requests the pieces from
the controller. The receiving agent discards the result unless it is the complete parent state of
the requested snapshot.
"""

import base64
import os
import re
import shutil
from pathlib import Path
from typing import Any

import zstandard

from vmckpt.agent.orders import LineOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.snapshot import spool
from vmckpt.errors import BadInput
from vmckpt.store import parent_state
from vmckpt.units import Seconds

_PIECE = 4 << 20
_NAME = re.compile(r"line\.json|chunks|\d{1,6}\.(map\.npy|prints)")


def move(order: LineOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Carry out one end of the transfer.

    Returns whether the parent state has moved, under "moved". Raises BadInput, GuestLocked, and
    VmckptError from the controller, and OSError.
    """
    lock = Path(order.state) / "spool" / f"line-{order.guest}-{order.store}"
    with spool.held(lock, patience=Seconds(0.0)):
        return {"moved": _give(order, channel) if order.gives else _take(order, channel)}


def _give(order: LineOrder, channel: ControllerChannel) -> bool:
    found = parent_state.load(order.line)
    whole = found is not None and found.snapshot == order.snapshot
    if whole:
        packing = zstandard.ZstdCompressor(level=1)
        for path in sorted(order.line.iterdir()):
            with path.open("rb") as file:
                while data := file.read(_PIECE):
                    packed = base64.b64encode(packing.compress(data)).decode()
                    channel.request("piece", name=path.name, data=packed)
    # Remove the parent state here only once the other host has all of it.
    arrived = bool(channel.request("kept", whole=whole))
    if arrived:
        parent_state.forget(order.line)
    return arrived


def _take(order: LineOrder, channel: ControllerChannel) -> bool:
    new, locked = parent_state.drafted(order.line)
    try:
        unpacking = zstandard.ZstdDecompressor()
        while piece := channel.request("more"):
            try:
                name, data = str(piece["name"]), base64.b64decode(piece["data"], validate=True)
                data = unpacking.decompress(data, max_output_size=_PIECE)
            except (KeyError, TypeError, ValueError, zstandard.ZstdError) as exc:
                raise BadInput(f"invalid piece of a parent state: {exc}") from exc
            if not _NAME.fullmatch(name):
                raise BadInput(f"{name!r} is not a file of a parent state")
            with (new / name).open("ab") as file:
                file.write(data)
        found = parent_state.load(new)
        if found is None or found.snapshot != order.snapshot:
            return False
        parent_state.forget(order.line)
        new.replace(order.line)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        os.close(locked)
    return True
