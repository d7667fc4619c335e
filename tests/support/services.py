"""A service that works on real stores, with guests that are only names."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import GUEST
from tests.support.stocking import Stock, stocked
from vmckpt.app import controller, fleet, scheduler, snapshot_store, snapshots
from vmckpt.app.controller import Controller
from vmckpt.inventory import Inventory
from vmckpt.model.events import Caller
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.policy import loader
from vmckpt.scheduler.schedules import ScheduleSelection
from vmckpt.scheduler.service import Told
from vmckpt.snapshot.request import Taken, TakeRequest
from vmckpt.units import Bytes, Seconds

POLICY = """\
version: vmckpt/v1
name: mine
select: {guests: [web*]}
snapshots:
  - name: often
    every: 1s
    keep: {last: 2}
    copies: [{to: far, keep: {last: 100}}]
    verify: {every: 1d}
"""
DB = replace(GUEST, name="web2", uuid="11111111-be04-4dd1-80ff-c8e5fa28580b")


class World:
    """What a service sees and does."""

    def __init__(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stock = stock
        self.guests: list[Guest] = [GUEST]
        self.silent: dict[str, str] = {}
        self.told: list[Told] = []
        self.asked: list[tuple[str, TakeRequest]] = []
        self.wrong: Callable[[TakeRequest], Exception | None] = lambda _: None
        self.stop = asyncio.Event()
        (stock.folder / "policies").mkdir(exist_ok=True)
        (stock.folder / "policies/mine.yaml").write_text(POLICY)

        async def guests(_: Inventory) -> tuple[Sequence[tuple[Host, Guest]], Mapping[str, str]]:
            host = self.inventory.host("alpha")
            return [(host, one) for one in self.guests], self.silent

        async def take(acting: Controller, store: str, request: TakeRequest) -> Taken:
            return await self.take(store, request, acting.caller)

        monkeypatch.setattr(fleet, "guests", guests)
        monkeypatch.setattr(snapshots, "take", take)

    @property
    def inventory(self) -> Inventory:
        return controller.load_inventory(self.stock.folder / "hosts.yaml")

    async def take(self, store: str, request: TakeRequest, caller: Caller) -> Taken:
        self.asked.append((store, request))
        error = self.wrong(request)
        if error is not None:
            raise error
        guest = next(one for one in self.guests if one.uuid == request.guest)
        number = len(self.asked)
        id_ = self.stock.put(
            f"n{number}", [number], in_=store, guest=guest.name, guest_uuid=guest.uuid,
            tags=dict(request.tags), made_at=time.time(),
        )  # fmt: skip
        return Taken(
            id=id_, name=id_, guest=guest.name, host="alpha", store=store, pause=Seconds(0.01),
            took=Seconds(0.1), read=Bytes(1), same=Bytes(0), zero=Bytes(0), written=Bytes(1),
            encrypted=False, warnings=(), job=None,
        )  # fmt: skip

    async def run(self, *, once: bool = True, limit: float = 20.0, **wanted: Any) -> int:
        policies = loader.load_all(self.stock.folder / "policies")

        def warn(line: str) -> None:
            self.told.append(Told(event="warning", text=line))

        caller = Caller(emit=lambda _: None, warn=warn, stop=self.stop)
        acting = Controller(inventory=self.inventory, policies=policies, caller=caller)
        running = scheduler.run(
            acting, ScheduleSelection(**wanted), identity=None, once=once, tell=self.told.append
        )
        return await asyncio.wait_for(running, limit)

    async def verdicts(self) -> dict[str, bool | None]:
        found = await snapshot_store.listed(self.inventory, "near", None)
        return {one.id: one.verdict.good for one in found}

    def has(self, store: str) -> set[str]:
        return {one.id for one in self.stock.store(store).manifests()}

    def said(self, event: str) -> list[str]:
        return [one.text for one in self.told if one.event == event]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("waited in vain")


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> World:
    return World(stocked(tmp_path, monkeypatch, capsys), monkeypatch)
