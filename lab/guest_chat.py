"""What chatting lab guests have sent and received, as their memory tells it. Pure.

The layout is that of `struct chat` in assets/prover.c.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAGIC = int.from_bytes(b"VMCCHAT1", "little")
MARK = struct.pack("<QQ", _MAGIC, ~_MAGIC & (1 << 64) - 1)
"""How the page begins."""
_HEAD = struct.Struct("<8Q")
_PEER = struct.Struct("<4Q")
_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One of the others."""

    sent: int
    """The highest number that was sent to it, or is just being sent."""
    received: int
    """The highest number that came from it."""
    first: int
    count: int
    """How many came."""

    @property
    def lost(self) -> int:
        """How many of its messages never came, between the first that did and the last.

        A guest that is captured while it counts one has counted it already, and not noted it yet.
        """
        return max(0, self.received - self.first + 1 - self.count) if self.count else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One guest's part."""

    own: int
    run: int
    peers: Mapping[int, Peer]


def parse(page: bytes) -> Chat | None:
    """The page of a guest that chats; None if it is another page."""
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
    """What was received and not sent, if these are one cut; empty: it is consistent."""
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
