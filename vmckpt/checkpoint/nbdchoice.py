"""How an NBD client and server agree on an export: the client's half."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vmckpt.checkpoint import nbdwire as wire
from vmckpt.checkpoint.nbdwire import Line, Nonsense, Refused
from vmckpt.errors import BadInput
from vmckpt.units import MIB

_LARGEST = (1 << 63) - 1
_MOST_REPLY = 65536
"""Of one answer; a name has at most 4096 bytes."""
_MOST_REPLIES = 256
_LONGEST_NAME = 4096


@dataclass(slots=True)
class Agreed:
    """What a server says of an export."""

    size: int = -1
    read_only: bool = False
    structured: bool = False
    contexts: dict[str, int] = field(default_factory=dict)
    """Those that it has of the wanted ones, and their numbers on this connection."""
    most: int = MIB
    """To be read at once."""


def agree(line: Line, export: str, contexts: Sequence[str]) -> Agreed:
    """Choose an export. Raises OSError, Gone, Nonsense and Refused."""
    found = Agreed()
    _greet(line)
    found.structured = _option(line, wire.OPT_STRUCTURED_REPLY, b"", _nothing) is None
    if contexts and found.structured:
        asked = struct.pack(">I", len(contexts)) + b"".join(map(_text, contexts))

        def take_context(kind: int, body: bytes) -> None:
            name, number = _context(kind, body)
            if name not in contexts or name in found.contexts or number in found.contexts.values():
                raise Nonsense("a context that was not asked for")
            found.contexts[name] = number

        _option(line, wire.OPT_SET_META_CONTEXT, _text(export) + asked, take_context)
    wishes = _text(export) + struct.pack(">HH", 1, wire.INFO_BLOCK_SIZE)
    refused = _option(line, wire.OPT_GO, wishes, lambda kind, body: _facts(kind, body, found))
    if refused is not None:
        raise Refused(refused)
    if found.size < 0:
        raise Nonsense("no word on how large it is")
    return found


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > _LONGEST_NAME:
        raise BadInput(f"{text[:40]!r}… is too long for NBD")
    return struct.pack(">I", len(data)) + data


def _greet(line: Line) -> None:
    if line.take(len(wire.GREETING)) != wire.GREETING:
        raise Nonsense("it does not greet as an NBD server does")
    (flags,) = struct.unpack(">H", line.take(2))
    if not flags & wire.FIXED_NEWSTYLE:
        raise Nonsense("it is an old server, without options")
    line.send(struct.pack(">I", flags & (wire.FIXED_NEWSTYLE | wire.NO_ZEROES)))


def _option(line: Line, option: int, body: bytes, take: Callable[[int, bytes], None]) -> str | None:
    """Ask for something; None if it was granted, else why not."""
    line.send(wire.OPTION.pack(wire.OPTION_MAGIC, option, len(body)), body)
    for _ in range(_MOST_REPLIES):
        magic, about, kind, length = wire.OPTION_REPLY.unpack(line.take(wire.OPTION_REPLY.size))
        if magic != wire.OPTION_REPLY_MAGIC or about != option or length > _MOST_REPLY:
            raise Nonsense("an answer that is none to what was asked")
        said = line.take(length)
        if kind == wire.REP_ACK:
            return None
        if kind & wire.REP_ERROR:
            return wire.REFUSALS.get(kind & ~wire.REP_ERROR, "it refused")
        take(kind, said)
    raise Nonsense("answers without end")


def _nothing(_kind: int, _body: bytes) -> None:
    raise Nonsense("an answer with more than a yes")


def _context(kind: int, body: bytes) -> tuple[str, int]:
    if kind != wire.REP_META_CONTEXT or len(body) < 4:
        raise Nonsense("a context of a wrong form")
    return body[4:].decode(errors="replace"), struct.unpack_from(">I", body)[0]


def _facts(kind: int, body: bytes, found: Agreed) -> None:
    if kind != wire.REP_INFO or len(body) < 2:
        raise Nonsense("facts of a wrong form")
    (about,) = struct.unpack_from(">H", body)
    form = {wire.INFO_EXPORT: wire.EXPORT_INFO, wire.INFO_BLOCK_SIZE: wire.BLOCK_INFO}.get(about)
    if form is None:
        return  # its name or a description
    if len(body) != form.size:
        raise Nonsense("facts of a wrong form")
    if about == wire.INFO_EXPORT:
        _, found.size, flags = form.unpack(body)
        found.read_only = bool(flags & wire.READ_ONLY)
        if found.size > _LARGEST:
            raise Nonsense(f"a disk of {found.size} bytes")
    else:
        _, smallest, _, most = form.unpack(body)
        if not 0 < smallest <= 65536 or most < 65536:
            raise Nonsense(f"blocks of {smallest} to {most} bytes")
        found.most = min(found.most, most // 65536 * 65536)
