"""Describe, create, preallocate and remove disk images on a host, with the host's qemu-img.

An image is created under a temporary name and renamed to its final path once its mark is in the
journal. So even if the controller dies, its images can be distinguished from other files.
`image_users` finds the guests that need a file, directly or through a backing chain.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from shlex import quote
from typing import Any

from vmckpt.errors import RemoteError
from vmckpt.model.disk import DiskCopy, Image, Made, Place
from vmckpt.remote.shell_files import FILES
from vmckpt.remote.ssh import Answer, Remote, last_line
from vmckpt.units import Bytes, Seconds

# Limit for preallocating a large image on a file system that must write zeros.
_LONG = Seconds(600.0)
_PERMISSIONS = 0o666
"""Permissions that an image may get. An executable file would let the source attack the target."""
_IN_USE = 4
_NOT_OURS = 3


async def describe(host: Remote, path: str, kind: str) -> Image:
    """Read facts about an image. Raises RemoteError.

    `kind`: the format in the guest's definition. The format is never probed: a guest could write
    the header of another format to a raw image, with files of the host as backing files.
    """
    answer = await host.run(["qemu-img", "info", "-U", "--output=json", "-f", kind, "--", path])
    mode = await host.run(["stat", "-c", "%a", "--", path])
    if answer.status != 0 or mode.status != 0:
        raise RemoteError(f"{host.host.name}: {path}: {_reason(answer, mode)}", host=host.host.name)
    try:
        return parse(answer.out, mode.out.strip(), kind)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise RemoteError(
            f"{host.host.name}: {path}: invalid answer from qemu-img: {str(exc)[:80]}",
            host=host.host.name,
            hint=f"as user {_user(host)}, run qemu-img info -U --output=json -f {kind}"
            f" {quote(path)} on {host.host.name}",
        ) from exc


def _user(host: Remote) -> str:
    return host.host.ssh.user if host.host.ssh is not None else "root"


def parse(text: str, mode: str, kind: str) -> Image:
    """Parse qemu-img's JSON. Raises ValueError, TypeError, LookupError or AttributeError.

    `mode`: permissions in octal; `kind`: the format. Values from the source are passed to the
    target's qemu-img and chmod, so only plain words are accepted.
    """
    told: dict[str, Any] = json.loads(text)
    make: dict[str, Any] = told.get("format-specific", {}).get("data", {}) if kind != "raw" else {}
    if not re.fullmatch("[0-7]{1,4}", mode):
        raise ValueError(f"mode {mode[:20]!r}")
    size = _size(told["virtual-size"])
    return Image(
        size=size,
        allocated=_size(told.get("actual-size", size)),
        options=_options(make, told) if kind == "qcow2" else "",
        mode=f"{int(mode, 8) & _PERMISSIONS:o}",
        backing=_name(told.get("backing-filename")),
        backing_format=_name(told.get("backing-filename-format")),
        data_file=_name(make.get("data-file")),
        snapshots=len(told.get("snapshots", ())),
        damaged=bool(make.get("corrupt")),
    )


def _size(value: object) -> Bytes:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"size {str(value)[:20]!r}")
    return Bytes(value)


def _name(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"file {str(value)[:20]!r}")
    return value


def _options(make: dict[str, Any], told: dict[str, Any]) -> str:
    """Return options for `qemu-img create -o`: the features that qemu-img has reported for an
    image.
    """
    words = {
        "compat": make.get("compat"),
        "cluster_size": told.get("cluster-size"),
        "refcount_bits": make.get("refcount-bits"),
        "lazy_refcounts": make.get("lazy-refcounts"),
        "extended_l2": make.get("extended-l2"),
        "compression_type": make.get("compression-type"),
    }
    return ",".join(f"{key}={_word(value)}" for key, value in words.items() if value is not None)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    word = str(value) if isinstance(value, int | str) else ""
    if not re.fullmatch("[a-z0-9][a-z0-9.]{0,19}", word):
        raise ValueError(f"option {str(value)[:20]!r}")
    return word


_PLACES = r"""
command -v qemu-img >/dev/null || exit 127
for path in "$@"; do
    folder=$(dirname -- "$path"); exists=n; writable=n
    if [ -e "$path" ] || [ -L "$path" ]; then exists=y; fi
    if [ -d "$folder" ] && [ -w "$folder" ]; then writable=y; fi
    free=$(df -PB1 -- "$folder" 2>/dev/null | awk 'NR==2 {print $4}')
    echo "$exists $writable $(stat -c %d -- "$folder" 2>/dev/null || echo -) ${free:-0}"
done
"""


async def places(host: Remote, paths: Sequence[str]) -> dict[str, Place]:
    """Return facts about the intended paths of images, by path.

    Raises RemoteError, also if the host has no qemu-img.
    """
    answer = await host.run(["sh", "-s", "--", *paths], text=_PLACES)
    if answer.status == 127:
        raise RemoteError(
            f"{host.host.name}: qemu-img is not installed",
            host=host.host.name,
            hint="install qemu-utils on the host",
        )
    lines = [line.split() for line in answer.out.splitlines()]
    if len(lines) != len(paths) or not all(_is_place(line) for line in lines):
        raise RemoteError(
            f"{host.host.name}: cannot inspect {paths[0]}: {_reason(answer)}", host=host.host.name
        )
    return {
        path: Place(
            exists=exists == "y", writable=writable == "y", device=device, free=Bytes(int(free))
        )
        for path, (exists, writable, device, free) in zip(paths, lines, strict=True)
    }


def _is_place(line: Sequence[str]) -> bool:
    return len(line) == 4 and re.fullmatch("[0-9]{1,18}", line[3]) is not None


# conv=excl never opens an existing file, not even one created at the last moment.
_CREATE = (
    FILES
    + r"""
set -eu; umask 077
path=$1; kind=$2; size=$3; mode=$4; options=$5; base=$6; format=$7
name=${path##*/}; image=/proc/self/fd/4
enter "${path%/*}"
dd if=/dev/null of="./$name" conv=excl status=none
hold "$name"
[ "$(stat -L -c '%s %h' "$image")" = "0 1" ] || { echo "$name was replaced" >&2; exit 1; }
if qemu-img create -q -f "$kind" ${options:+-o "$options"} ${base:+-b "$base" -F "$format"} \
    -- "$image" "$size" >&2 &&
    chmod "$mode" "$image"
then stat -L -c '%d:%i %w' "$image"
else rm -f -- "./$name"; exit 1; fi
"""
)


async def create(host: Remote, copy: DiskCopy, path: str) -> str:
    """Create an empty image at `path`. Returns the mark that identifies it.

    Raises RemoteError, also if the file already exists; an existing file is left unchanged.
    """
    options = [copy.options] if copy.options else []
    if copy.full and copy.format == "qcow2":
        options.append("preallocation=falloc")
    args = [path, copy.format, str(copy.size), copy.mode, ",".join(options)]
    args += copy.base or ("", "")
    answer = await host.run(["sh", "-s", "--", *args], text=_CREATE, limit=_LONG)
    if answer.status != 0:
        raise RemoteError(
            f"{host.host.name}: cannot create {copy.path}: {_reason(answer)}", host=host.host.name
        )
    return answer.out.strip()


# ln never replaces an existing file. On file systems without hard links, mv -n checks first.
_PUBLISH = (
    FILES
    + r"""
path=$1; temporary=./${2##*/}; name=./${path##*/}
enter "${path%/*}" || exit 1
if ln -T -- "$temporary" "$name" 2>/dev/null; then exec rm -f -- "$temporary"; fi
[ ! -e "$name" ] && [ ! -L "$name" ] || { echo "File exists" >&2; exit 1; }
mv -nT -- "$temporary" "$name" && [ ! -e "$temporary" ]
"""
)


async def publish(host: Remote, made: Made) -> None:
    """Rename created images to their final paths.

    Raises RemoteError, also if a file already exists there; an existing file is left unchanged.
    """
    for path in made.marks:
        args = [path, made.temporary(path)]
        answer = await host.run(["sh", "-s", "--", *args], text=_PUBLISH)
        if answer.status != 0:
            raise RemoteError(
                f"{host.host.name}: cannot create {path}: {_reason(answer)}", host=host.host.name
            )


_REMOVE = (
    FILES
    + r"""
path=$1; mark=$2; temporary=./${3##*/}; name=./${path##*/}
enter "${path%/*}" || { [ $? = 2 ] && exit 0; exit 1; }
published=y; [ ! -e "$temporary" ] || published=n
rm -f -- "$temporary"
if [ -z "$mark" ] || [ ! -e "$name" ]; then exit 0; fi
if [ "$(stat -c '%d:%i %w' -- "$name")" != "$mark" ]; then
    [ $published = n ] || exit 3
    exit 0
fi
hold "${path##*/}" || exit 3
# Opening the image for writing needs its locks, which a QEMU that uses the image holds.
qemu-io -f raw -c quit -- /proc/self/fd/4 >/dev/null 2>&1 || exit 4
rm -f -- "$name"
"""
)


async def remove(host: Remote, made: Made, *, patience: Seconds = Seconds(5.0)) -> dict[str, str]:
    """Remove images made by `create`. Returns why an image could not be removed, by path.

    A file that has replaced an image is kept, and so is an image that a QEMU has open. `patience`:
    seconds to wait for the target's QEMU to exit. Raises RemoteError.
    """
    left = dict[str, str]()
    for path, mark in made.marks.items():
        give_up = asyncio.get_running_loop().time() + patience
        args = [path, mark, made.temporary(path)]
        while True:
            answer = await host.run(["sh", "-s", "--", *args], text=_REMOVE)
            if answer.status != _IN_USE or asyncio.get_running_loop().time() > give_up:
                break
            await asyncio.sleep(0.5)
        reasons = {_IN_USE: "a QEMU has it open", _NOT_OURS: "the file was replaced meanwhile"}
        if answer.status != 0:
            left[path] = reasons.get(answer.status, _reason(answer))
    return left


_KEEP = r"""
path=$1; kind=$2
if [ "$kind" = qcow2 ]; then qemu-img check -q -U -f qcow2 -- "$path" >&2 || exit 1; fi
sync -- "$path"
"""


async def keep(host: Remote, path: str, kind: str) -> None:
    """Check an image and sync it to disk; a completed copy guarantees neither.

    `kind`: the image's format. Raises RemoteError.
    """
    answer = await host.run(["sh", "-s", "--", path, kind], text=_KEEP, limit=_LONG)
    if answer.status != 0:
        raise RemoteError(
            f"{host.host.name}: checking {path} failed: {_reason(answer)}", host=host.host.name
        )


async def flush(host: Remote, paths: Sequence[str]) -> None:
    """Sync files and their directories to disk. Raises RemoteError."""
    folders = sorted({str(PurePosixPath(path).parent) for path in paths})
    answer = await host.run(["sync", "--", *paths, *folders], limit=_LONG)
    if answer.status != 0:
        raise RemoteError(
            f"{host.host.name}: cannot sync {paths[0]} to disk: {_reason(answer)}",
            host=host.host.name,
        )


UNFIT = "- "
"""Prefix of the reason why an image must not be removed; `marks` returns it instead of a mark."""
# Other file systems may be shared with other hosts, whose guests may use the image.
_MARKS = (
    FILES
    + r"""
look() {
    enter "${1%/*}" && on=$(stat -f -c %T -- .) || exit 1
    hold "${1##*/}" 2>/dev/null || { echo "- it is not a regular file"; return; }
    image=/proc/self/fd/4
    if [ "$2" = held ] && qemu-io -f raw -c quit -- "$image" >/dev/null 2>&1; then
        echo "- the guest has a different file open"; return
    fi
    case $on in
        ext*|xfs|btrfs|zfs|f2fs|jfs|reiserfs|bcachefs|tmpfs|overlay*)
            stat -L -c '%d:%i %w' "$image" || exit 1;;
        *) echo "- it may be shared with other hosts: its file system is $on";;
    esac
}
held=$1; shift
command -v qemu-io >/dev/null || { echo "qemu-io is not installed" >&2; exit 1; }
for path in "$@"; do (look "$path" "$held") || exit 1; done
"""
)


async def marks(host: Remote, paths: Sequence[str], *, held: bool = False) -> dict[str, str]:
    """Return the mark of each image for `remove`, or UNFIT and a reason to keep the image.

    `held`: whether a QEMU should have the images open. Raises RemoteError.
    """
    args = ["held" if held else "free", *paths]
    answer = await host.run(["sh", "-s", "--", *args], text=_MARKS)
    found = answer.out.splitlines()
    if answer.status != 0 or len(found) != len(paths):
        raise RemoteError(
            f"{host.host.name}: cannot inspect {paths[0]}: {_reason(answer)}", host=host.host.name
        )
    return dict(zip(paths, found, strict=True))


async def stamps(host: Remote, paths: Sequence[str]) -> str:
    """Return a text that changes whenever one of the files is written. Raises RemoteError."""
    answer = await host.run(["stat", "-L", "-c", "%d:%i %s %.9Y", "--", *paths])
    if answer.status != 0:
        raise RemoteError(f"{host.host.name}: {paths[0]}: {_reason(answer)}", host=host.host.name)
    return answer.out


_ROOM = (
    FILES
    + r"""
enter "${1%/*}" && hold "${1##*/}" && fallocate --length "$2" /proc/self/fd/4
"""
)


async def take_room(host: Remote, path: str, size: Bytes) -> None:
    """Preallocate a raw image. The content is kept, even while a guest writes to the image.

    Call this after the copy: the copy leaves holes where the source has holes, even in an image
    that was preallocated before. Raises RemoteError.
    """
    answer = await host.run(["sh", "-s", "--", path, str(size)], text=_ROOM, limit=_LONG)
    if answer.status != 0:
        raise RemoteError(
            f"{host.host.name}: cannot preallocate {path}: {_reason(answer)}",
            host=host.host.name,
            hint=f"run fallocate -l {size} -- {quote(path)} on the host",
        )


def _reason(*answers: Answer) -> str:
    """Return the last line of the first failed command's output."""
    for answer in answers:
        if answer.status != 0:
            return last_line(answer.err, f"status {answer.status}").removeprefix("qemu-img: ")
    return "invalid answer"


_CHAINS_LIMIT = Seconds(300.0)
# A file that root cannot see does not exist.
_SEEN = r"""
seen() {
    [ -e "$1" ] || [ "$(id -u)" = 0 ] || { echo "$1 is not visible to this user" >&2; exit 1; }
    [ -e "$1" ]
}
"""
# A chain ends at a missing file. An image with a broken chain is useless to its guest, so it needs
# no protection.
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
            *) echo "$path: its backing file cannot be determined" >&2; exit 1;;
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
"""Matches a name with a protocol, such as "rbd:…" or "nbd://…", which is not a file of the host."""


@dataclass(frozen=True, slots=True)
class Has:
    """An image of a guest."""

    guest: str
    path: str
    format: str
    """Format of the image; "" if unknown, as for a backing file."""


async def image_users(host: Remote, images: Sequence[Has]) -> dict[str, str]:
    """Return the guest that needs each file, by "device:inode", regardless of the file's names.

    `images`: the images of all guests. The definition of a guest that is off does not name backing
    files, so these are read from the images. Raises RemoteError, also if an image cannot be read.
    """
    files = {one.path: one.guest for one in images}
    layered = [word for one in images if _has_more(one.format) for word in (one.format, one.path)]
    if layered:
        chains = await host.run(["sh", "-s", "--", *layered], text=_CHAINS, limit=_CHAINS_LIMIT)
        for line in _lines(host, chains):
            found = list(below(line))
            files |= {path: files.get(found[0], "a guest") for path in found if path not in files}
    paths = list(files)
    inodes = await host.run(["sh", "-s", "--", *paths], text=_NUMBERS, limit=_CHAINS_LIMIT)
    numbers = _lines(host, inodes)
    if len(numbers) != len(paths):
        raise RemoteError(
            f"{host.host.name}: cannot identify the images of its guests", host=host.host.name
        )
    return {number: files[path] for path, number in zip(paths, numbers, strict=True) if number}


def _has_more(kind: str) -> bool:
    return kind not in ("", "raw")


def _lines(host: Remote, answer: Answer) -> list[str]:
    if answer.status != 0:
        why = last_line(answer.err, f"status {answer.status}")
        raise RemoteError(
            f"{host.host.name}: cannot read an image of one of its guests: {why}",
            host=host.host.name,
        )
    return answer.out.splitlines()


def below(told: str) -> Iterator[str]:
    """Yield all files of an image's chain, the image first, from qemu-img's JSON.

    Raises RemoteError.
    """
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
        raise RemoteError(f"invalid answer from qemu-img: {str(exc)[:80]}") from exc


def _files(name: str) -> Iterator[str]:
    """Yield the host's files that a QEMU file name refers to. Raises ValueError."""
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
