"""Preparing a guest: what was interrupted is recovered before cards are replaced."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import GUEST, HOST
from vmckpt import recovery
from vmckpt.app import fleet, hosts
from vmckpt.app.controller import Caller, Controller
from vmckpt.errors import ReadOnly
from vmckpt.inventory import Inventory
from vmckpt.model.host import Host
from vmckpt.snapshot import prepare
from vmckpt.snapshot.prepare import Readiness

READY = Readiness(guest="web1", host="alpha", findings=(), lacks=False, restart=False)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order."""
    calls: list[str] = []

    async def recovered(*_: object) -> bool:
        calls.append("recover")
        return False

    async def guests(_: Inventory) -> Any:
        return [(HOST, GUEST)], {}

    async def readiness(_: Host, __: str, ___: Caller, *, live: bool) -> Readiness:
        calls.append(f"look, live={live}")
        return READY

    async def make_ready(_: Host, __: str, ___: Caller, *, live: bool) -> Readiness:
        calls.append(f"prepare, live={live}")
        return READY

    monkeypatch.setattr(recovery, "recover_before", recovered)
    monkeypatch.setattr(fleet, "guests", guests)
    monkeypatch.setattr(prepare, "readiness", readiness)
    monkeypatch.setattr(prepare, "make_ready", make_ready)
    return calls


@pytest.fixture
def acting() -> Controller:
    known = Inventory(path=Path("hosts.yaml"), hosts={"alpha": HOST}, observer=None)
    caller = Caller(emit=lambda _: None, warn=print, stop=asyncio.Event())
    return Controller(inventory=known, caller=caller)


@pytest.mark.parametrize("live", [False, True])
async def test_only_cards_need_recovery_first(
    done: list[str], acting: Controller, live: bool
) -> None:
    assert await hosts.guest_readiness(acting, GUEST.name, live=live) == READY
    assert await hosts.make_ready(acting, GUEST.name, live=live) == READY
    first = ["recover"] if live else []
    assert done == [f"look, live={live}", *first, f"prepare, live={live}"]


async def test_nothing_is_prepared_in_read_only_mode(done: list[str], acting: Controller) -> None:
    forbidden = replace(acting, inventory=replace(acting.inventory, read_only=True))
    with pytest.raises(ReadOnly):
        await hosts.make_ready(forbidden, GUEST.name, live=True)
    assert done == []
