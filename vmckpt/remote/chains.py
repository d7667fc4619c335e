"""Which guests of a host need a file: theirs, or one that theirs lie on."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from vmckpt.errors import RemoteError
from vmckpt.remote.ssh import Answer, Remote, last_line
from vmckpt.units import Seconds

_LONG = Seconds(300.0)
# What root does not see is not there.
_SEEN = r"""
seen() {
    [ -e "$1" ] || [ "$(id -u)" = 0 ] || { echo "$1 is not seen by this user" >&2; exit 1; }
    [ -e "$1" ]
}
"""
# A chain ends where its next file is gone: then the image is of no use to its guest, and keeps
# nobody from anything.
_CHAINS = (
    _SEEN
    + r"""
while [ $# -gt 1 ]; do
    kind=$1; path=$2; shift 2
    seen "$path" || continue
    if ! found=$(qemu-img info -U --backing-chain --output=json -f "$kind" -- "$path" 2>/dev/null)
    then
        found=$(qemu-img info -U --output=json -f "$kind" -- "$path") || exit 1
        below=$(printf '%s' "$found" |
            sed -n 's/^    "full-backing-filename": "\(.*\)",\{0,1\}$/\1/p')
        case $below in
            /*) ;;
            *) echo "$path: what it lies on cannot be read" >&2; exit 1;;
        esac
        if seen "$below"; then echo "$below cannot be read" >&2; exit 1; fi
    fi
    printf '%s' "$found" | tr -d '\n'; echo
done
"""
)
_NUMBERS = (
    _SEEN
    + r"""
for path in "$@"; do
    if seen "$path"; then stat -L -c %d:%i -- "$path" || exit 1; else echo; fi
done
"""
)

_PROTOCOL = re.compile("[a-z][a-z0-9+_]*:")
"""Behind "rbd:…" and "nbd://…" is no file of this host."""


@dataclass(frozen=True, slots=True)
class Has:
    """What a guest has."""

    guest: str
    path: str
    format: str
    """Of an image; "" if that is not known, as of one that lies below another."""


async def users(host: Remote, images: Sequence[Has]) -> dict[str, str]:
    """Who needs a file, by file system and inode, whatever names it has.

    `images`: of all guests, also those that are off: no definition says what their images lie on.
    Raises RemoteError, also if a single one cannot be looked through.
    """
    files = {one.path: one.guest for one in images}
    layered = [word for one in images if _has_more(one.format) for word in (one.format, one.path)]
    if layered:
        chains = await host.run(["sh", "-s", "--", *layered], text=_CHAINS, limit=_LONG)
        for line in _lines(host, chains):
            found = list(below(line))
            files |= {path: files.get(found[0], "a guest") for path in found if path not in files}
    paths = list(files)
    inodes = await host.run(["sh", "-s", "--", *paths], text=_NUMBERS, limit=_LONG)
    numbers = _lines(host, inodes)
    if len(numbers) != len(paths):
        raise RemoteError(f"{host.host.name}: the images of its guests cannot be told apart")
    return {number: files[path] for path, number in zip(paths, numbers, strict=True) if number}


def _has_more(kind: str) -> bool:
    return kind not in ("", "raw")


def _lines(host: Remote, answer: Answer) -> list[str]:
    if answer.status != 0:
        why = last_line(answer.err, f"status {answer.status}")
        raise RemoteError(f"{host.host.name}: an image of its guests cannot be read: {why}")
    return answer.out.splitlines()


def below(told: str) -> Iterator[str]:
    """All files of an image, from qemu-img's JSON; the image first. Raises RemoteError."""
    try:
        found: list[dict[str, Any]] | dict[str, Any] = json.loads(told)
        for one in [found] if isinstance(found, dict) else found:
            name = str(one["filename"])
            yield from _files(name)
            data = one.get("format-specific", {}).get("data", {}).get("data-file")
            if data is not None:
                its = str(data)
                yield from _files(its if _PROTOCOL.match(its) else _beside(name, its))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise RemoteError(f"qemu-img's answer makes no sense: {str(exc)[:80]}") from exc


def _files(name: str) -> Iterator[str]:
    """Files of this host behind what QEMU calls a file name. Raises ValueError."""
    name = name.removeprefix("file:")
    if name.startswith("json:"):
        yield from _named(json.loads(name.removeprefix("json:")))
    elif name.startswith("/"):
        yield name
    elif not _PROTOCOL.match(name):
        raise ValueError(f"file {name[:60]!r}")


def _beside(image: str, path: str) -> str:
    return str(PurePosixPath(image).parent / path)


def _named(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key.rpartition(".")[2] == "filename":
                yield from _files(str(value))
            else:
                yield from _named(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _named(value)
