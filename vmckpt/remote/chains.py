"""Which guests of a host need a file: theirs, or one that theirs lie on."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from vmckpt.errors import RemoteError
from vmckpt.remote.ssh import Remote, last_line

# What root does not see is not there.
_CHAINS = r"""
while [ $# -gt 1 ]; do
    kind=$1; path=$2; shift 2
    if [ ! -e "$path" ]; then
        [ "$(id -u)" = 0 ] || { echo "$path is not seen by this user" >&2; exit 1; }
        continue
    fi
    found=$(qemu-img info -U --backing-chain --output=json -f "$kind" -- "$path") || exit 1
    printf '%s' "$found" | tr -d '\n'; echo
done
"""
_NUMBERS = r"""
for path in "$@"; do
    if [ -e "$path" ]; then stat -L -c %d:%i -- "$path" || exit 1
    else
        [ "$(id -u)" = 0 ] || { echo "$path is not seen by this user" >&2; exit 1; }
        echo
    fi
done
"""


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
        for line in await _run(host, _CHAINS, layered):
            found = list(below(line))
            files |= {path: files.get(found[0], "a guest") for path in found if path not in files}
    paths = list(files)
    numbers = await _run(host, _NUMBERS, paths) if paths else []
    if len(numbers) != len(paths):
        raise RemoteError(f"{host.host.name}: the images of its guests cannot be told apart")
    return {number: files[path] for path, number in zip(paths, numbers, strict=True) if number}


def _has_more(kind: str) -> bool:
    return kind not in ("", "raw")


async def _run(host: Remote, script: str, args: Sequence[str]) -> list[str]:
    answer = await host.run(["sh", "-s", "--", *args], text=script)
    if answer.status != 0:
        why = last_line(answer.err, f"status {answer.status}")
        raise RemoteError(f"{host.host.name}: an image of its guests cannot be read: {why}")
    return answer.out.splitlines()


def below(told: str) -> Iterator[str]:
    """All files of an image, from qemu-img's JSON; the image first. Raises RemoteError."""
    try:
        chain: list[dict[str, Any]] = json.loads(told)
        for one in chain:
            name = str(one["filename"])
            data = one.get("format-specific", {}).get("data", {}).get("data-file")
            names = [name] if data is None else [name, str(PurePosixPath(name).parent / data)]
            for path in names:
                if path.startswith("/"):
                    yield path
                elif not re.match("[a-z+]+://", path):
                    raise ValueError(f"file {path[:60]!r}")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise RemoteError(f"qemu-img's answer makes no sense: {str(exc)[:80]}") from exc
