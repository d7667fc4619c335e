"""Protections in a journal, and agents that say what a test wants."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from vmckpt.cli import watch_protection
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.model.host import Host
from vmckpt.protection import agent_client
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.units import Seconds

WEB1 = NewOperation(kind="protect", guest="web1", guest_uuid="u-1", source="alpha", target="beta")
WORKS: dict[str, Any] = {
    "role": "primary", "phase": "protecting", "epoch": 7, "rpo_s": 0.12, "interval_s": 0.1,
    "interval_why": "as asked for: 100 ms", "median": {"pause_s": 0.02},
}  # fmt: skip
STANDS: dict[str, Any] = {"role": "backup", "runs": True, "ready": True, "says": "it follows"}
FULL: dict[str, Any] = {
    **WORKS, "rpo_worst_s": 0.5, "pause_p99_s": 0.03, "guest_clock_behind_s": 4.0,
    "output_delay_s": 0.085, "output_delay_worst_s": 0.31, "packets_lost": 0,
    "finder": "compare", "finder_why": "it works everywhere",
    "median": {"pause_s": 0.02, "pause_stop_s": 0.002, "busy_s": 0.01, "bytes": 2048, "pages": 3},
}  # fmt: skip


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts:\n  alpha: {uri: 'qemu:///system'}\n  beta: {uri: 'qemu:///system'}\n")
    monkeypatch.setenv("VMCKPT_INVENTORY", str(hosts))
    monkeypatch.setattr(watch_protection, "_ASK_EVERY", Seconds(0.02))
    with Journal() as made:
        yield made


def protected(journal: Journal) -> str:
    """One that its agents go on with."""
    id_ = journal.begin(WEB1, asked_by="eve@desk")
    journal.update(id_, {"phase": "protecting"})
    journal.entrust(id_, "alpha")
    return id_


def agents(monkeypatch: pytest.MonkeyPatch, say: Callable[[int], tuple[Any, Any]]) -> None:
    """What they say, by how often they were asked before."""
    asked = iter(range(10**6))

    async def both(hosts: Mapping[str, Host], *_: object) -> dict[str, ProtectionStatus]:
        told = dict(zip(("alpha", "beta"), say(next(asked)), strict=True))
        return {name: parse_answer(told[name]) for name in hosts}

    monkeypatch.setattr(agent_client, "both", both)
