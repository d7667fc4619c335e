"""What the agent tells its watchdog, and which kind that is."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.replicas import LEASE, session
from tests.support.staging import in_memory
from vmckpt.agent.replication import handover, mirrors, watchdog
from vmckpt.hypervisor.qemu_process import lease_timer
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.replication.session import Session
from vmckpt.replication.watchdog import process as watchdog_process
from vmckpt.replication.watchdog import systemd_unit
from vmckpt.replication.watchdog.facts import Facts
from vmckpt.replication.watchdog.rules import KillMethod

REFUSED = "process 1: the kernel does not permit tracing it"


@pytest.fixture
def process() -> Iterator[HeldProcess]:
    with HeldProcess(os.getpid()) as held:
        yield held


def begun(
    monkeypatch: pytest.MonkeyPatch, one: Session, process: HeldProcess, kept_by: KillMethod | None
) -> tuple[Facts, bool, Path]:
    told: list[tuple[Facts, bool]] = []

    def begin(facts: Facts, *, unit: bool) -> None:
        told.append((facts, unit))

    monkeypatch.setattr(watchdog_process, "start", begin)
    with in_memory() as folder:
        watchdog.start_watchdog(one, folder, process, kept_by).close()
    ((facts, unit),) = told
    return facts, unit, folder


@pytest.mark.parametrize(
    ("kept_by", "pair", "unit"),
    [
        (None, False, False),
        (KillMethod.KERNEL, False, False),
        (KillMethod.UNIT, False, True),
        (KillMethod.PAIR, True, False),
    ],
)
def test_the_watchdog_is_of_the_kind_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch, process: HeldProcess, kept_by: KillMethod | None, pair: bool,
    unit: bool,
) -> None:  # fmt: skip
    facts, as_unit, _ = begun(monkeypatch, session(lease=LEASE), process, kept_by)
    assert (facts.pair, as_unit) == (pair, unit)


def test_a_guest_can_be_resumed_and_a_standby_is_never(
    monkeypatch: pytest.MonkeyPatch, process: HeldProcess
) -> None:
    facts, _, folder = begun(monkeypatch, session(undo="{}"), process, None)
    assert facts.resumable is not None
    assert facts.resumable.lock == str(folder / handover.AGENT_LOCK)
    assert facts.resumable.logs == (str(mirrors.place_of(folder, 0)[0].control),)
    facts, _, _ = begun(monkeypatch, session(role="backup"), process, None)
    assert facts.resumable is None


@pytest.mark.parametrize(
    ("refused", "systemd", "kept_by"),
    [
        (None, True, KillMethod.KERNEL),
        (REFUSED, True, KillMethod.UNIT),
        (REFUSED, False, KillMethod.PAIR),
    ],
)
def test_where_qemu_may_not_be_traced_watchdogs_are_restarted(
    monkeypatch: pytest.MonkeyPatch, process: HeldProcess, refused: str | None, systemd: bool,
    kept_by: KillMethod,
) -> None:  # fmt: skip
    monkeypatch.setattr(lease_timer, "why_not", lambda _: refused)
    monkeypatch.setattr(systemd_unit, "available", lambda: systemd)
    assert watchdog.kill_method(session(lease=LEASE), process) == (kept_by, refused)
    assert watchdog.kill_method(session(), process) == (None, None)
