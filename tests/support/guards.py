"""A watchdog's unit tests: processes that stand for QEMU and the agent, and real watchdogs."""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from vmckpt.lease.clock import boottime
from vmckpt.replication.watchdog import process as watchdog_process
from vmckpt.replication.watchdog import shared_page
from vmckpt.replication.watchdog.facts import Facts
from vmckpt.replication.watchdog.rules import Rules
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt.units import Seconds

RULES = Rules()


class Bench:
    """Processes that stand for QEMU and the agent, and a watchdog or a pair."""

    def __init__(
        self, folder: Path, *, lasts: float = 30.0, rules: Rules = RULES, **more: Any
    ) -> None:
        """`more`: what else its facts say."""
        self.folder = folder
        self.page = WatchdogPage.create(folder / "page", lasts=Seconds(lasts))
        self.qemu = subprocess.Popen(["sleep", "600"])
        self.agent = subprocess.Popen(["sleep", "600"])
        self.page.agent = shared_page.identity(self.agent.pid)
        self.facts = Facts(
            page=str(folder / "page"), qemu=shared_page.identity(self.qemu.pid),
            command=("sh", "-c", f"echo $$ >> {folder}/agents; exec sleep 600"),
            folder=str(folder), rules=rules, **more,
        )  # fmt: skip

    def begin(self) -> int:
        """The watchdog's number."""
        watchdog_process.start(self.facts)
        assert self.guard() > 0  # a signal to 0 would reach all of these tests
        return self.guard()

    def guard(self) -> int:
        """One that runs; 0: none does."""
        return min(self.guards(), default=0)

    def guards(self) -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_text().split("\0")
                ours = words[1:4] == ["-P", "-m", "vmckpt.replication.watchdog.process"]
                if ours and str(self.folder) in words:
                    found.append(int(process.name))
        return found

    def log(self) -> str:
        file = self.folder / watchdog_process.LOG
        return file.read_text() if file.exists() else ""

    def agents(self) -> list[int]:
        """Those that the watchdog has started."""
        file = self.folder / "agents"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def close(self) -> None:
        (self.folder / watchdog_process.OVER).touch()
        for process in (self.qemu, self.agent):
            process.kill()
            process.wait()
        until(lambda: not self.guard())
        for number in self.agents():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.page.close()


def until(true: Callable[[], object], limit: float = 10.0) -> float:
    """Wait for it; when it came true."""
    end = boottime() + limit
    while not true():
        assert boottime() < end, "it did not come true"
        time.sleep(0.005)
    return boottime()


_NUMBERS = itertools.count()


@pytest.fixture
def folder() -> Iterator[Path]:
    """On tmpfs, as it must be."""
    made = Path(f"/dev/shm/vmckpt-guard-{os.getpid()}-{next(_NUMBERS)}")
    made.mkdir()
    yield made
    for file in made.iterdir():
        file.unlink()
    made.rmdir()


def dead(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is not None
