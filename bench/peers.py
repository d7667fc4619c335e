"""The programs with which vmckpt is compared, as scripts/peers installs them in .peers.

For snapshots, vmckpt, restic and borg store the same files on the same disk. Complete commands are
compared, from their start until all data is on the disk. The files of a repository or a restore are
fsynced within the measured time, even if the program has done so. All programs encrypt (restic
always does, borg with repokey-blake2) and compress: vmckpt with zstd level 3, restic with zstd as
it does by default, borg with lz4, its default, and also with zstd level 3.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
PEERS = Path(__file__).parent.parent / ".peers"
RESTIC, BORG = str(PEERS / "usr/bin/restic"), str(PEERS / "borg/bin/borg")


@dataclass(frozen=True, slots=True)
class Ran:
    """The resources that a command used, and its output."""

    seconds: float
    """Elapsed time until all data was on the disk."""
    cpu: float
    """User and system CPU time of all threads, in seconds."""
    peak: float
    """Peak memory, in MiB."""
    told: str


class Failed(Exception):
    """A program failed, or is not installed."""


def told(words: Sequence[str], more: Mapping[str, str] | None = None) -> str:
    """Return what a peer's command prints. Raises Failed if the peer is not installed."""
    if not (PEERS / ".complete").exists():
        raise Failed("the programs to compare with are not installed; run scripts/peers")
    return run(words, Path("/"), more or {}, None).told.strip()


def run(words: Sequence[str], folder: Path, more: Mapping[str, str], durable: Path | None) -> Ran:
    """Run a command in `folder`, then fsync the directory `durable`. Raises Failed."""
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
    """Fsync all files and directories below a directory."""
    for root, _, names in os.walk(folder):
        for path in (root, *(os.path.join(root, name) for name in names)):  # noqa: PTH118
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


def size(folder: Path) -> int:
    """Return the size of all files below a directory, in bytes."""
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


class Program:
    """One of the three programs, with a repository in its own directory."""

    name: str
    environment: Mapping[str, str] = {}

    def __init__(self, home: Path) -> None:
        self.home = home
        self.repository = home / "repository"

    def _run(self, words: Sequence[str], folder: Path, durable: Path | None = None) -> Ran:
        return run(words, folder, self.environment, durable)

    def init(self) -> None:
        """Create a repository."""
        raise NotImplementedError

    def put(self, source: Path) -> Ran:
        """Store a snapshot of a directory."""
        raise NotImplementedError

    def get(self, target: Path) -> Ran:
        """Restore the last snapshot to an empty directory."""
        raise NotImplementedError


class Vmckpt(Program):
    """vmckpt: `snapshot_feed` processes files as an agent processes a guest."""

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


class Restic(Program):
    """restic reads changed files completely. Its metadata cache is next to the repository."""

    name = "restic"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.environment = {
            "RESTIC_REPOSITORY": str(self.repository), "RESTIC_PASSWORD": "a password",
            "RESTIC_CACHE_DIR": str(home / "cache"),
        }  # fmt: skip

    def init(self) -> None:
        # Only repositories of version 2 support compression.
        self._run([RESTIC, "init", "-q", "--repository-version", "2"], self.home)

    def put(self, source: Path) -> Ran:
        return self._run([RESTIC, "backup", "-q", "."], source, self.repository)

    def get(self, target: Path) -> Ran:
        words = [RESTIC, "restore", "-q", "latest", "--target", str(target)]
        return self._run(words, self.home, target)


class Borg(Program):
    """borg uses one thread, and content-defined chunks, which are its default."""

    name, compression = "borg lz4", "lz4"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.environment = {
            "BORG_REPO": str(self.repository), "BORG_PASSPHRASE": "a password",
            "BORG_BASE_DIR": str(home / "base"),
        }  # fmt: skip
        self._count = 0

    def init(self) -> None:
        self._run([BORG, "init", "-e", "repokey-blake2"], self.home)

    def put(self, source: Path) -> Ran:
        self._count += 1
        words = [BORG, "create", "-C", self.compression, f"::s{self._count}", "."]
        return self._run(words, source, self.repository)

    def get(self, target: Path) -> Ran:
        return self._run([BORG, "extract", f"::s{self._count}"], target, target)


class BorgZstd(Borg):
    """borg with the compression that vmckpt uses."""

    name, compression = "borg zstd", "zstd,3"


PROGRAMS: tuple[type[Program], ...] = (Vmckpt, Restic, Borg, BorgZstd)


def versions() -> dict[str, str]:
    """Return the versions of restic and borg. Raises Failed."""
    return {
        "restic": told([RESTIC, "version"]).split()[1],
        "borg": told([BORG, "--version"]).split()[1],
    }
