"""Find files that other guests on this host use as images or as backing files."""

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import BadInput, GuestLocked
from vmckpt.units import Seconds

_LIMIT = Seconds(20.0)


def check_backing_chain(places: Iterable[Path], users: Mapping[str, Sequence[str]]) -> None:
    """Check that no path is in the backing chain of another guest's image.

    `users`: guest and format of each image of other guests, by path. Raises GuestLocked.
    """
    for place, (guest, path) in of_others(places, users).items():
        raise GuestLocked(
            f"{place} is in use by guest {guest} (image {path}); nothing was changed",
            hint="restore the snapshot as another guest with --as",
        )


def of_others(
    places: Iterable[Path], users: Mapping[str, Sequence[str]]
) -> dict[Path, tuple[str, str]]:
    """Return the paths that other guests use, each with the guest and its top image.

    `places`: the paths to look for; `users`: guest and format of each image in use, by path. The
    backing chain is read from the images, since libvirt reports it only for running guests.
    """
    ours = [place for place in places if place.exists()]
    found: dict[Path, tuple[str, str]] = {}
    if not ours:
        return found
    for path, (guest, format_) in users.items():
        for below in (path, *_below(path, format_)):
            for place in ours:
                if Path(below).exists() and place.samefile(below):
                    found.setdefault(place, (guest, path))
    return found


def _below(path: str, format_: str) -> Iterator[str]:
    """Yield the files of an image's backing chain.

    Ignores an image that cannot be read: no guest can start from such an image.
    """
    if format_ in ("", "raw") or not Path(path).exists():
        return
    with suppress(BadInput):
        yield from chain(path, format_, in_use=True)


def chain(path: str, format_: str, *, in_use: bool) -> list[str]:
    """Return the files of an image's backing chain, the image first.

    `in_use`: a guest may be writing to the image. Raises BadInput with the reason if the image
    cannot be read.
    """
    words = ["qemu-img", "info", *(["-U"] if in_use else []), "--backing-chain", "--output=json"]
    try:
        done = subprocess.run(
            [*words, "-f", format_, "--", path], capture_output=True, check=False,
            timeout=_LIMIT, text=True,
        )  # fmt: skip
        if done.returncode:
            said = " ".join(done.stderr.split())[:200] or "no reason given"
            raise BadInput(f"{path} cannot be opened: {said}")
        return [str(one["filename"]) for one in json.loads(done.stdout)]
    except (OSError, ValueError, TypeError, LookupError, subprocess.TimeoutExpired) as exc:
        raise BadInput(f"{path} cannot be read: {exc}") from exc
