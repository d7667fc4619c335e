"""Small objects of a store: a text or bytes, and behind it a line with the BLAKE3 of key and body.

A changed bit is seen, and so is an object that was put in another one's place.

Pure.
"""

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from vmckpt.errors import StoreDamaged
from vmckpt.store.backend import Data

_MARK = b"\nblake3 "
_TAIL = len(_MARK) + 64 + 1


def framed(key: str, body: Data) -> bytes:
    """The object's bytes."""
    return b"".join((body, _MARK, _sum(key, body), b"\n"))


def unframed(key: str, raw: bytes, where: str) -> bytes:
    """The body of an object. Raises StoreDamaged."""
    body, tail = raw[: max(0, len(raw) - _TAIL)], raw[-_TAIL:]
    if tail != _MARK + _sum(key, body) + b"\n":
        raise StoreDamaged(
            f"{where}: {key} is damaged: its checksum does not match",
            mend="vmckpt snapshot verify tells what else is",
        )
    return body


def written(key: str, values: Mapping[str, Any]) -> bytes:
    """The bytes of an object that is JSON."""
    return framed(key, json.dumps(values, indent=1).encode())


def parsed(key: str, raw: bytes, where: str) -> dict[str, Any]:
    """What an object of JSON tells. Raises StoreDamaged."""
    body = unframed(key, raw, where)
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise StoreDamaged(f"{where}: {key} is no JSON: {str(exc)[:80]}") from exc
    if not isinstance(values, dict):
        raise StoreDamaged(f"{where}: {key} is not what a store writes")
    return values


def _sum(key: str, body: Data) -> bytes:
    return blake3(key.encode() + b"\0").update(body).hexdigest().encode()
