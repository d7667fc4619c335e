"""Extract the messages that lab guests have exchanged from their memory, and check a cut. Pure.

A cut is one capture of several guests. The memory layout is `struct chat` in assets/prover.c.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAGIC = int.from_bytes(b"VMCCHAT1", "little")
MARK = struct.pack("<QQ", _MAGIC, ~_MAGIC & (1 << 64) - 1)
"""The first bytes of the memory page that records the messages."""
_HEAD = struct.Struct("<8Q")
_PEER = struct.Struct("<4Q")
_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The messages exchanged with another guest."""

    sent: int
    """The highest number that was sent to the other guest, or is being sent."""
    received: int
    """The highest number that was received from the other guest."""
    first: int
    count: int
    """Number of messages received from the other guest."""

    @property
    def lost(self) -> int:
        """Number of missing messages between the first and the last message received.

        A guest that is captured while it receives a message may have counted the message but not
        yet stored its number.
        """
        return max(0, self.received - self.first + 1 - self.count) if self.count else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The messages that a guest has exchanged with all others."""

    own: int
    run: int
    peers: Mapping[int, Peer]


def parse(page: bytes) -> Chat | None:
    """Parse a page of a guest's memory. Returns None if the page does not record messages."""
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
    """Return the contradictions in a cut: messages received but not sent. Empty if none."""
    found = []
    for receiver in cut:
        for sender in cut:
            if sender.own == receiver.own:
                continue
            came = receiver.peers[sender.own].received
            sent = sender.peers[receiver.own].sent
            if came > sent:
                found.append(
                    f"guest {receiver.own} received message {came} from guest {sender.own}, which"
                    f" sent messages only up to {sent}"
                )
    return found
