"""Images that were there before, and become a standby's: looked at, and whether they may."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vmckpt.units import Bytes, Seconds

_LIMIT = Seconds(20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What is at a path."""

    path: str
    there: bool = True
    regular: bool = True
    size: Bytes | None = None
    """As a guest would see it; None: it cannot be read."""
    says: str = ""
    """Why it cannot."""
    user: str = ""
    """Another guest whose image it is, or lies below."""


def look(path: str, format_: str) -> Image:
    """What is there, if it is an image of that format which nobody has open."""
    place = Path(path)
    if not place.exists():
        return Image(path=path, there=False)
    if not place.is_file():
        return Image(path=path, regular=False)
    words = ["qemu-img", "info", "--output=json", "-f", format_, "--", path]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT)
        if done.returncode != 0:
            return Image(path=path, says=" ".join(done.stderr.split())[:200] or "no word")
        told = json.loads(done.stdout)
        if told.get("format-specific", {}).get("data", {}).get("corrupt"):
            return Image(path=path, says="it is marked as damaged")
        return Image(path=path, size=Bytes(int(told["virtual-size"])))
    except (OSError, ValueError, TypeError, LookupError, subprocess.TimeoutExpired) as exc:
        return Image(path=path, says=str(exc)[:200])


def why_not(image: Image, size: int) -> str | None:
    """Why it cannot be the image of a disk of so many bytes; None: it can. Pure."""
    if not image.there:
        return f"{image.path} is gone"
    if not image.regular:
        return f"{image.path} is no file"
    if image.user:
        return f"{image.path} is used by guest {image.user}"
    if image.size is None:
        busy = "lock" in image.says
        return f"{image.path} is open in another program" if busy else (
            f"{image.path} cannot be read: {image.says}"
        )  # fmt: skip
    if image.size != size:
        return f"{image.path} has {image.size} bytes, and the disk {size}"
    return None
