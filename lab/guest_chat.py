"""Read from lab guests' memory which messages they have exchanged, and check a cut. Pure.

The layout is that of `struct chat` in assets/prover.c.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAGIC = int.from_bytes(b"VMCCHAT1", "little")
MARK = struct.pack("<QQ", _MAGIC, ~_MAGIC & (1 << 64) - 1)
"""The first bytes of the page."""
_HEAD = struct.Struct("<8Q")
_PEER = struct.Struct("<4Q")
_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The messages exchanged with another guest."""

    sent: int
    """The highest number that was sent to it, or is being sent."""
    received: int
    """The highest number that was received from it."""
    first: int
    count: int
    """Number of messages received from it."""

    @property
    def lost(self) -> int:
        """Number of messages missing between the first and the last that were received.

        A guest that is captured while it receives a message may have counted it but not yet stored
        its number.
        """
        return max(0, self.received - self.first + 1 - self.count) if self.count else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The messages that a guest has exchanged with all others."""

    own: int
    run: int
    peers: Mapping[int, Peer]


def parse(page: bytes) -> Chat | None:
    """Parse a page of a guest's memory. Returns None if it is not the page with the messages."""
    if page[: len(MARK)] != MARK:
        return None
    _, _, run, own, count, *_ = _HEAD.unpack_from(page)
    if not own < count <= _MOST:
        return None
    peers = {}
    for number in range(count):
        sent, received, first, came = _PEER.unpack_from(page, _HEAD.size + number * _PEER.size)
        if number != own:
            peers[number] = Peer(sent=sent, received=received, first=first, count=came)
    return Chat(own=own, run=run, peers=peers)


def violations(cut: Sequence[Chat]) -> list[str]:
    """Return the messages that were received but not sent in a cut; empty if it is consistent."""
    found = []
    for receiver in cut:
        for sender in cut:
            if sender.own == receiver.own:
                continue
            came = receiver.peers[sender.own].received
            sent = sender.peers[receiver.own].sent
            if came > sent:
                found.append(f"{receiver.own} has {came} from {sender.own}, which sent {sent}")
    return found
