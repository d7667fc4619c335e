"""vmckpt, restic and borg as the snapshot bench runs them: the same files, the same disk, in turns.

Compared are whole commands, from their start until all they wrote is on the disk: the files of a
repository, and those of a restore, are fsynced inside the timing, whether the program did or not.
All encrypt (restic as it always does, borg with repokey-blake2) and compress with zstd: vmckpt and
borg with level 3, restic 0.14 with its own default, which is zstd, too. Everything else is left as
each program has it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
HOW_TO_GET = "on Debian and Ubuntu: apt-get install restic borgbackup"


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command took."""

    seconds: float
    """Until all of it was on the disk."""
    cpu: float
    """Seconds of all its threads, user and system."""
    peak: float
    """MiB of memory."""
    told: str


class Failed(Exception):
    """A program of which the bench knows nothing better than to say so."""


def run(words: Sequence[str], folder: Path, more: Mapping[str, str], durable: Path | None) -> Ran:
    """One command, and then `durable`, a folder, on the disk."""
    began = time.perf_counter()
    with subprocess.Popen(
        words, cwd=folder, env={**os.environ, **more}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stderr is not None
        told = program.stdout.read()
        wrong = program.stderr.read()
        _, status, usage = os.wait4(program.pid, 0)
        program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode != 0:
        raise Failed(f"{' '.join(words)} exited with {program.returncode}: {wrong[-500:]}")
    if durable is not None:
        fsync(durable)
    took = time.perf_counter() - began
    return Ran(took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, told)


def fsync(folder: Path) -> None:
    """All files below a folder, and the folders."""
    for root, _, names in os.walk(folder):
        for path in (root, *(os.path.join(root, name) for name in names)):  # noqa: PTH118
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


class Program:
    """One of the three, with a repository in a folder of its own."""

    name: str
    environment: Mapping[str, str] = {}

    def __init__(self, home: Path) -> None:
        self.home = home
        self.repository = home / "repository"

    def _run(self, words: Sequence[str], folder: Path, durable: Path | None = None) -> Ran:
        return run(words, folder, self.environment, durable)

    def init(self) -> None:
        """A new repository."""
        raise NotImplementedError

    def put(self, source: Path) -> Ran:
        """One snapshot of what is in a folder."""
        raise NotImplementedError

    def get(self, target: Path) -> Ran:
        """The last one, into an empty folder."""
        raise NotImplementedError

    @classmethod
    def version(cls) -> str:
        """In one line; Failed if it is not there."""
        if shutil.which(cls.name) is None:
            raise Failed(f"{cls.name} is not installed, and is what is compared with; {HOW_TO_GET}")
        words = [cls.name, "--version"] if cls.name == "borg" else [cls.name, "version"]
        return run(words, Path("/"), {}, None).told.strip()


class Vmckpt(Program):
    """Our own: `snapshot_feed` does with files what an agent does with a guest."""

    name = "vmckpt"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.repository = home / "ours" / "store"

    def _feed(self, *words: str, durable: Path | None = None) -> Ran:
        feed = [sys.executable, "-m", "bench.snapshot_feed", words[0], str(self.home / "ours")]
        return self._run([*feed, *words[1:]], Path(__file__).parent.parent, durable)

    def init(self) -> None:
        self._feed("init")

    def put(self, source: Path) -> Ran:
        return self._feed("put", str(source), durable=self.repository)

    def get(self, target: Path) -> Ran:
        return self._feed("get", str(target), durable=target)

    @classmethod
    def version(cls) -> str:
        return "this tree"


class Restic(Program):
    """Reads all of a file that has changed; its cache of metadata is kept beside the repository."""

    name = "restic"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.environment = {
            "RESTIC_REPOSITORY": str(self.repository), "RESTIC_PASSWORD": "a password",
            "RESTIC_CACHE_DIR": str(home / "cache"),
        }  # fmt: skip

    def init(self) -> None:
        # Version 2 of a repository is the one that compresses.
        self._run(["restic", "init", "-q", "--repository-version", "2"], self.home)

    def put(self, source: Path) -> Ran:
        return self._run(["restic", "backup", "-q", "."], source, self.repository)

    def get(self, target: Path) -> Ran:
        words = ["restic", "restore", "-q", "latest", "--target", str(target)]
        return self._run(words, self.home, target)


class Borg(Program):
    """One thread; chunks cut by content, as is its default."""

    name = "borg"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.environment = {
            "BORG_REPO": str(self.repository), "BORG_PASSPHRASE": "a password",
            "BORG_BASE_DIR": str(home / "base"),
        }  # fmt: skip
        self._count = 0

    def init(self) -> None:
        self._run(["borg", "init", "-e", "repokey-blake2"], self.home)

    def put(self, source: Path) -> Ran:
        self._count += 1
        words = ["borg", "create", "-C", "zstd,3", f"::s{self._count}", "."]
        return self._run(words, source, self.repository)

    def get(self, target: Path) -> Ran:
        return self._run(["borg", "extract", f"::s{self._count}"], target, target)


PROGRAMS: tuple[type[Program], ...] = (Vmckpt, Restic, Borg)


def told_of(ran: Ran) -> dict[str, float]:
    """What our own feed says of itself."""
    found: dict[str, float] = json.loads(ran.told)
    return found
