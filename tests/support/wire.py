"""Frames of a protection's connection, written and read with one token."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from vmckpt.replication.protocol.framing import Reader, parts
from vmckpt.replication.protocol.messages import EpochEnd, Message, Tally

TOKEN = 7


U64 = st.integers(0, (1 << 64) - 1)


DATA = st.binary(max_size=300)


SEAL = EpochEnd(epoch=1, base=0, messages=0, digest=Tally().digest(), final=False, taken=0.0)


def write(message: Message, *, token: int) -> bytes:
    return b"".join(parts(message, token=token))


def read(data: bytes, cuts: Sequence[int] = ()) -> list[Message]:
    """The messages of a connection that brings `data` in pieces and then ends."""
    reader = Reader(token=TOKEN)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    found = [
        message for first, last in pairwise(edges) for message in reader.feed(data[first:last])
    ]
    reader.close()
    return found
