"""What is in snapshot stores: days of retention, and snapshots that change meanwhile."""

import zoneinfo
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from tests.support.stocking import Stock, scheduled, stock
from vmckpt.app import controller, snapshot_store
from vmckpt.inventory import Inventory
from vmckpt.policy.model import Keep
from vmckpt.snapshot.prune import Survey, plan

__all__ = ["stock"]


def test_pinned_meanwhile_stays(stock: Stock) -> None:
    made = scheduled(stock)
    found = snapshot_store.prune(
        keeping_inventory(stock), None, Keep(last=1), "nightly", dry_run=False
    )
    stock.store().pin(made[1])
    stock.store().delete(made[2])

    told = {one.id: one for one in found.carry_out()}
    assert told[made[1]].reasons == ("pinned meanwhile",)
    assert (told[made[1]].stays, told[made[1]].deleted) == (True, False)
    assert told[made[2]].reasons == ("already deleted by another process",)


def keeping_inventory(stock: Stock) -> Inventory:
    return controller.load_inventory(stock.folder / "hosts.yaml")


def test_days_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    summer = datetime(2025, 7, 1, tzinfo=UTC)
    monkeypatch.setenv("TZ", "Europe/Berlin")
    zone = snapshot_store.local_zone()
    assert isinstance(zone, ZoneInfo)
    assert summer.astimezone(zone).hour == 2
    file = Path(zoneinfo.TZPATH[0], "Asia/Kolkata")
    monkeypatch.setenv("TZ", f":{file}" if file.exists() else "Asia/Kolkata")
    assert summer.astimezone(snapshot_store.local_zone()).strftime("%z") == "+0530"
    monkeypatch.setattr(snapshot_store, "_LOCAL_TIME", Path("/nowhere"))
    for odd in ("/etc/passwd", "/nowhere/at/all"):
        monkeypatch.setenv("TZ", odd)
        assert snapshot_store.local_zone() is UTC
    for odd in ("Nowhere/Never", "../../etc/passwd", "", ":UTC"):
        monkeypatch.setenv("TZ", odd)
        summer.astimezone(snapshot_store.local_zone())
    empty = Survey(known={}, left={}, pins=frozenset())
    assert plan(empty, Keep(last=1), schedule="a", now=0.0, zone=zone) == ()
