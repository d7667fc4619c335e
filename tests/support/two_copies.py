"""A guest that runs on two hosts, by what hosts and agents say."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.builders import GUEST
from tests.tui.still import entry
from vmckpt.app import fleet
from vmckpt.inventory import Inventory
from vmckpt.model.guest import Copies, Guest, GuestState
from vmckpt.model.host import Host
from vmckpt.units import Seconds

WEB = replace(GUEST, name="web1", uuid="u-1", state=GuestState.RUNNING)
HOSTS = {name: Host(name=name, uri=f"qemu+tcp://{name}/system") for name in ("alpha", "beta")}
INVENTORY = Inventory(path=Path("hosts.yaml"), hosts=HOSTS, observer=None)
TWICE = Copies(guest="web1", uuid="u-1", hosts=("alpha", "beta"))
OVER = {"role": "backup", "outcome": "failed-over", "why": "silent for 2 s", "runs": True}
BOTH = entry()
BOTH["says"]["alpha"]["runs"] = True
BOTH["says"]["beta"] = OVER
WORKS = {"role": "primary", "runs": True}
Found = list[tuple[Host, Guest]]


def asked(monkeypatch: pytest.MonkeyPatch, *looks: Found) -> list[Seconds | None]:
    """The hosts answer like that, one look after the other; the limits of the looks."""
    limits: list[Seconds | None] = []
    answers = iter(looks)

    async def guests(_: object, within: Seconds | None = None) -> object:
        limits.append(within)
        return next(answers), {}

    async def listing(_: object, within: Seconds | None = None) -> fleet.Listing:
        limits.append(within)
        return fleet.Listing(found=next(answers), errors={})

    monkeypatch.setattr(fleet, "guests", guests)
    monkeypatch.setattr(fleet, "listing", listing)
    monkeypatch.setattr("vmckpt.app.controller.load_inventory", lambda _: INVENTORY)
    return limits


ONE: Found = [(HOSTS["beta"], WEB)]
TWO: Found = [(host, WEB) for host in HOSTS.values()]
