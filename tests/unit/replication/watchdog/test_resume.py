"""A guest that its agent left paused, and the watchdog that resumes it."""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.replicas import Qemu
from vmckpt.errors import HypervisorError
from vmckpt.replication.disks.log_control import Control
from vmckpt.replication.watchdog import resume
from vmckpt.replication.watchdog.facts import Resumable
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt.units import Seconds

UNDO = {
    "guest": Qemu.guest, "capabilities": {"x-ignore-shared": False}, "bandwidth": 7, "runs": True,
    "folder": "",
}  # fmt: skip


class Bench:
    def __init__(self, folder: Path) -> None:
        self.page = WatchdogPage.create(folder / "page", lasts=Seconds(4.0))
        self.page.stopped = 12.0
        self.qemu = Qemu()
        self.qemu.state = "postmigrate"
        self.log = folder / "disk0.control"
        Control.create(self.log)
        self.open(True)
        self.lock = folder / "agent.lock"
        self.facts = Resumable(
            guest=Qemu.guest, host="alpha", uri="qemu:///system", undo=json.dumps(UNDO),
            lock=str(self.lock), logs=(str(self.log), str(folder / "none")),
        )  # fmt: skip

    def open(self, on: bool) -> None:
        with Control(self.log) as control:
            control.never_wait = on

    def is_open(self) -> bool:
        with Control(self.log) as control:
            return control.never_wait


class Visited:
    """What stands for a monitor of its own."""

    def __init__(self, qemu: Qemu) -> None:
        self._qemu = qemu

    def __call__(self, guest: str, *, host: str, uri: str) -> "Visited":
        assert (guest, host, uri) == (Qemu.guest, "alpha", "qemu:///system")
        return self

    def __enter__(self) -> Qemu:
        return self._qemu

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path)
    monkeypatch.setattr(resume, "QmpMonitor", Visited(made.qemu))
    yield made
    made.page.close()


def test_the_guest_runs_once_all_is_put_back(bench: Bench) -> None:
    assert resume.resume(bench.facts, bench.page)
    assert bench.qemu.state == "running"
    assert bench.qemu.events.index("migrate-set-capabilities") < bench.qemu.events.index("cont")
    assert (bench.page.stopped, bench.is_open()) == (0.0, False)


def test_one_at_work_is_left_alone(bench: Bench) -> None:
    """It may be in the middle of its own undoing, or of the next epoch."""
    with bench.lock.open("w") as agent:
        fcntl.flock(agent, fcntl.LOCK_EX)
        assert not resume.resume(bench.facts, bench.page)
    assert bench.qemu.events == []
    assert (bench.page.stopped, bench.is_open()) == (12.0, True)


def test_one_that_came_and_went_has_done_it(bench: Bench) -> None:
    bench.page.stopped = 0.0
    assert resume.resume(bench.facts, bench.page)
    assert bench.qemu.events == []


def test_a_guest_that_cannot_be_resumed_still_counts_as_paused(bench: Bench) -> None:
    bench.qemu.fails["cont"] = HypervisorError("no answer", host="alpha")
    with pytest.raises(HypervisorError, match="no answer"):
        resume.resume(bench.facts, bench.page)
    assert (bench.page.stopped, bench.is_open()) == (12.0, True)
    with bench.lock.open("w") as agent:  # and an agent may try
        fcntl.flock(agent, fcntl.LOCK_EX | fcntl.LOCK_NB)
