"""A local user of a host, who swaps names in his own directory for as long as root works there."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from vmckpt.errors import VmckptError

NOBODY = 65534
ROUNDS = 1_000
SECRET = b"root:$y$secret\n"

# Links to what is root's, FIFOs, sockets, files of its own, and the directory itself for a link to
# root's. It must name each thing before it is there: it guesses, as it may know all names of ours.
_SWAPS = """
import os, random, socket, sys
folder, bait, *names = sys.argv[1:]
aside = folder + ".aside"

def clear(path):
    try:
        os.unlink(path)
    except OSError:
        pass

def plant(path):
    what = random.randrange(6)
    clear(path)
    if what == 0:
        os.symlink(bait + "/" + random.choice(("shadow", "new")), path)
    elif what == 1:
        os.mkfifo(path)
    elif what == 2:
        made = socket.socket(socket.AF_UNIX)
        made.bind(path)
        made.close()
    elif what == 3:
        # Not open(): root may have renamed a FIFO of ours to that path, and nothing would read it.
        own = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK)
        os.write(own, b"mine")
        os.close(own)
    elif what == 4:
        os.symlink(bait, path + ".link")
        os.rename(path + ".link", path)

print("ready", flush=True)
while True:
    for name in names:
        try:
            plant(folder + "/" + name)
        except OSError:
            clear(folder + "/" + name + ".link")
    for _ in range(3):
        try:
            os.rename(folder, aside)
            os.symlink(bait, folder)
            os.unlink(folder)
        except OSError:
            pass
        try:
            os.rename(aside, folder)
        except OSError:
            pass
"""


@dataclass
class Ground:
    """A directory of the user's, and one of root's that the user wants root to touch."""

    top: Path
    names: tuple[str, ...]
    """Which the user swaps; files of root's have them as well."""
    theirs: Path = field(init=False)
    """Its parent is the user's as well."""
    bait: Path = field(init=False)

    def __post_init__(self) -> None:
        self.top.chmod(0o755)
        self.theirs, self.bait = self.top / "home" / "images", self.top / "bait"
        self.theirs.mkdir(parents=True)
        for one in (self.theirs, self.theirs.parent):
            os.chown(one, NOBODY, NOBODY)
        self.bait.mkdir(mode=0o755)
        for name in ("shadow", *self.names):
            (self.bait / name).write_bytes(SECRET)
            (self.bait / name).chmod(0o600)
        self._before = self._seen()

    def _seen(self) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for one in (self.bait, *sorted(self.bait.rglob("*"))):
            seen = one.lstat()
            state = (seen.st_ino, seen.st_mode, seen.st_uid, seen.st_gid, seen.st_mtime_ns)
            found.append((one.name, *state, one.read_bytes() if one.is_file() else b""))
        return found

    def untouched(self) -> bool:
        """Whether all that is root's is as it was, and nothing came."""
        return self._seen() == self._before

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The user swaps those names, and the directory, as long as the block lasts."""
        with user(_SWAPS, str(self.theirs), str(self.bait), *self.names):
            yield
        # Whatever moment it was killed at.
        with suppress(OSError):
            self.theirs.unlink()
        with suppress(OSError):
            self.theirs.with_name("images.aside").rename(self.theirs)


@contextmanager
def ground(*names: str) -> Iterator[Ground]:
    """A new one where other users get to; not in pytest's directory, which is root's alone."""
    top = Path(tempfile.mkdtemp(prefix="vmckpt-test-"))
    try:
        yield Ground(top, names)
    finally:
        shutil.rmtree(top)


@contextmanager
def user(program: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """An ordinary user's Python program, which prints "ready" and then runs until it is killed."""
    command = [str(Path(sys.executable).resolve()), "-I", "-S", "-c", program, *words]
    with subprocess.Popen(
        command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
            assert process.poll() is None, process.stderr and process.stderr.read()
        finally:
            process.kill()


@dataclass(frozen=True)
class Tally:
    """How a loop went."""

    done: int
    refused: int

    @property
    def both(self) -> bool:
        """Whether root came to its end sometimes, and was kept from it sometimes."""
        return self.done > 0 and self.refused > 0


def race(
    work: Callable[[], object], *, rounds: int = ROUNDS, limit: int = 120, both: bool = True
) -> Tally:
    """Do it that often, for half a second, and until it has succeeded and failed at least once.

    It may fail as root's work does, but never wait. A busy machine may not run the local user's
    process for longer than half a second; `limit` ends a loop in which one of both never happens.
    """
    done = refused = 0
    began = time.monotonic()
    with within(limit):
        while (
            done + refused < rounds
            or time.monotonic() < began + 0.5
            or (both and not (done and refused) and time.monotonic() < began + limit / 2)
        ):
            try:
                work()
                done += 1
            except (OSError, VmckptError):
                refused += 1
    return Tally(done, refused)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """A test that waits for a FIFO or a socket fails."""

    def late(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"it waits, after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def written_by_qemu_img(words: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
    """Stands in for qemu-img, which takes 10 ms to start: creates its file as qemu-img does."""
    path = next(one for one in words if one.startswith("/") and "qemu" not in one)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    os.write(file, b"an image")
    os.close(file)
    return subprocess.CompletedProcess([*words], 0, "", "")
