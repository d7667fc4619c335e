"""Copies of the tree in which lines are broken and tests run.

The checkout is only read. All files are in a temporary directory. Every process that a test starts,
even a process that leaves the session, is found by a mark in its environment and killed.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.mutations import watcher
from bench.mutations.mutation import Mutation, Suite
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

MARK = "VMCKPT_MUTATION"
"""Environment variable of all processes that a test starts."""
_GRACE = 5.0
"""Seconds in which the fixtures of an interrupted pytest may clean up."""
_OPTIONS = (
    # Property tests do not count: with other examples, they may miss the mutation.
    "-m", "not hypothesis", "-p", "no:cacheprovider", "-p", "watcher", "-x", "-q", "--no-header",
)  # fmt: skip


class Interrupted(Exception):
    """The runner must stop."""


class WrongCode(Exception):
    """The tests did not run the mutated code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a run of pytest."""

    code: int | None
    """The exit code; None if the run exceeded its time limit."""
    test: str | None
    """The first test that failed, or the last test that ran before the time limit."""
    seconds: float
    output: str


class Copy:
    """A copy of the tree, used by one thread at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        """`root`: the checkout. `folder`: a directory that is created. Raises OSError."""
        self._tree, self._temporary, self._plugin = folder / "tree", folder / "t", folder / "plugin"
        self._notes, self._output = folder / "notes", folder / "output"
        self._token = secrets.token_hex(8)
        self._stop = False
        folder.mkdir()
        folder.chmod(0o711)  # PostgreSQL runs as another user
        self._plugin.mkdir()
        shutil.copy(watcher.__file__, self._plugin / "watcher.py")
        shutil.copytree(root, self._tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))

    def stop(self) -> None:
        """Interrupt the current run; later runs raise Interrupted. Called by another thread."""
        self._stop = True

    @contextmanager
    def broken(self, mutation: Mutation) -> Iterator[None]:
        """Apply a mutation while the block runs. Raises OutOfDate."""
        path = self._tree / mutation.file
        text = path.read_text()
        self._write(path, mutation.applied(text))
        try:
            yield
        finally:
            self._write(path, text)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        # Python identifies compiled code only by size and second, so it may be outdated.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(text)

    def run(self, suite: Suite, limit: float, *, only: str | None = None) -> Run:
        """Run tests for at most `limit` seconds. `only`: the ID of a single test.

        Raises Interrupted, WrongCode.
        """
        self._notes.unlink(missing_ok=True)
        self._temporary.mkdir(mode=0o711, exist_ok=True)
        chosen = [only] if only is not None else [*suite.files]
        if only is None and suite.keyword:
            chosen += ["-k", suite.keyword]
        command = [sys.executable, "-m", "pytest", *_OPTIONS, f"--basetemp={self._temporary}/p"]
        began = time.monotonic()
        with self._output.open("w+b") as output:
            process = subprocess.Popen(
                [*command, *chosen], cwd=self._tree, env=self._environment(), stdout=output,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                code = self._ended(process, began + limit)
            finally:
                self._clear(process)
            seconds = time.monotonic() - began
            output.seek(0)
            text = output.read().decode(errors="replace")
        if code == watcher.OTHER_CODE:
            raise WrongCode(text.strip().splitlines()[-1])
        return Run(code=code, test=self._told(code), seconds=seconds, output=text)

    def _environment(self) -> dict[str, str]:
        more = {
            # For processes in other directories too: this Python has the checkout installed.
            "PYTHONPATH": f"{self._tree}:{self._plugin}", "TMPDIR": str(self._temporary),
            "VMCKPT_WATCHER_FILE": str(self._notes), "VMCKPT_WATCHER_COPY": str(self._tree),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._temporary / "hypothesis"),
            MARK: self._token,
        }  # fmt: skip
        return {**os.environ, **more}

    def _ended(self, process: subprocess.Popen[bytes], until: float) -> int | None:
        while time.monotonic() < until and not self._stop:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(0.1)
        if self._stop:
            raise Interrupted
        return None

    def _clear(self, process: subprocess.Popen[bytes]) -> None:
        """Remove all processes and files of a run."""
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        while _end_marked(f"{MARK}={self._token}".encode()):
            process.poll()
            time.sleep(0.01)
        process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _told(self, code: int | None) -> str | None:
        last: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            for line in self._notes.read_text().splitlines():
                last = json.loads(line)
                if code is not None and "failed" in last:
                    return str(last["failed"])
        return str(last["began"]) if code is None and "began" in last else None


def _end_marked(mark: bytes) -> bool:
    """Kill all processes with a mark in their environment. Returns whether there were any."""
    found = False
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError), HeldProcess(int(folder.name)) as process:
            # Read while the process is held, so that a later process cannot have its ID.
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found = True
                process.kill()
    return found
