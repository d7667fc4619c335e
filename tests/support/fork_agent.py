"""Agents that keep families of forks in memory, and guests and snapshots to fork."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.support.restored import TAKEN
from tests.support.stocking import Stock
from tests.support.two_copies import WEB
from vmckpt.agent import client
from vmckpt.agent.fork_orders import ForkOrder
from vmckpt.app import fleet
from vmckpt.errors import RemoteError, VmckptError
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.snapshot import create
from vmckpt.snapshot.restore import preflight
from vmckpt.store.repository import Store

UUID = "c7a5fdbd-edaf-9455-926a-d65c16db1809"
XML = f"""<domain type='kvm'><name>web1</name><uuid>{UUID}</uuid><os><type>hvm</type>
<nvram>/var/lib/libvirt/qemu/nvram/web1_VARS.fd</nvram></os><devices>
<disk type='file' device='disk'><driver name='qemu' type='raw'/>
<source file='/srv/vm/web1.img'/><target dev='vda' bus='virtio'/></disk>
<interface type='bridge'><mac address='52:54:00:00:00:01'/><source bridge='br0'/></interface>
</devices></domain>"""
WEB1 = replace(WEB, uuid=UUID)


@dataclass
class ForkAgents:
    """The agents of all hosts of an inventory."""

    stock: Stock
    families: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The families on each host, as an agent reports them."""
    ordered: list[ForkOrder] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)
    """Why forks are not started, by name; "*": all of them."""
    silent: dict[str, str] = field(default_factory=dict)
    """Hosts that do not answer, with the error."""
    lasts: bool = False
    """Whether the server of a family never ends, so that its snapshot stays pinned."""
    breaks: VmckptError | None = None
    """The error that each order to start forks ends with."""

    async def __call__(
        self, host: Host, order: Mapping[str, Any], _: object, stop: asyncio.Event
    ) -> dict[str, Any]:
        """Carry out an order as `client.run_order` does."""
        if host.name in self.silent:
            raise RemoteError(self.silent[host.name], host=host.name)
        here = self.families.setdefault(host.name, [])
        match order["do"]:
            case "fork":
                return self._fork(here, ForkOrder.from_json(order))
            case "families":
                return {"families": here}
            case "drop-forks":
                return {"dropped": self._gone(here, order["guests"])}
            case _:
                self.kept += self._gone(here, [order["guest"]])
                return {"kept": True}

    def _fork(self, here: list[dict[str, Any]], order: ForkOrder) -> dict[str, Any]:
        self.ordered.append(order)
        if self.breaks is not None:
            raise self.breaks
        told = [
            {"guest": one.guest, "name": one.name, "took": 0.25, "clock_not_set": "",
             "error": self.fails.get(one.name, self.fails.get("*", ""))}
            for one in order.children
        ]  # fmt: skip
        runs = [one for one in told if not one["error"]]
        if runs:
            here.append({
                "family": order.family, "template": order.template, "snapshot": order.snapshot,
                "store": order.store.name,
                "children": [
                    {"guest": one["guest"], "name": one["name"], "runs": True,
                     "memory_bytes": 3 << 20, "disk_bytes": 1 << 20}
                    for one in runs
                ],
            })  # fmt: skip
            self._store(order.store.name).pin(order.snapshot, "forks")
        return {"children": told, "took": 0.5}

    def _gone(self, here: list[dict[str, Any]], uuids: list[str]) -> list[str]:
        gone = []
        for family in list(here):
            gone += [one["guest"] for one in family["children"] if one["guest"] in uuids]
            family["children"] = [
                one for one in family["children"] if one["guest"] not in uuids
            ]  # fmt: skip
            if not family["children"]:
                here.remove(family)
                if not self.lasts and all(one["snapshot"] != family["snapshot"] for one in here):
                    self._store(family["store"]).unpin(family["snapshot"])
        return gone

    def _store(self, name: str) -> Store:
        return self.stock.store(name)

    def names(self, host: str = "alpha") -> list[str]:
        """The names of all forks on a host."""
        return [one["name"] for family in self.families.get(host, []) for one in family["children"]]


def fork_agents(stock: Stock, monkeypatch: pytest.MonkeyPatch, *guests: Guest) -> ForkAgents:
    """Agents on alpha, which has the guests, and on beta; snapshots are taken into the stock."""
    hosts = "hosts: {alpha: {uri: 'test:///default'}, beta: {uri: 'test:///default'}}\n"
    stores = (stock.folder / "hosts.yaml").read_text().splitlines()[1]
    (stock.folder / "hosts.yaml").write_text(f"{hosts}{stores}\n")
    agents = ForkAgents(stock)

    async def found(inventory: Any, within: object = None) -> fleet.FoundGuests:
        alpha = inventory.host("alpha")
        return [(alpha, one) for one in guests or (WEB1,)], {}

    async def checked(*_: object, **__: object) -> tuple[str, ...]:
        return ()

    async def take(at: Any, place: Any, _: object, request: Any, __: object, **___: object) -> Any:
        id_ = stock.put(
            f"taken {stock.made}", [1, 2], in_=place.name, domain_xml=XML, guest=at[1].name,
            guest_uuid=at[1].uuid, host=at[0].name, tags=dict(request.tags),
        )  # fmt: skip
        return replace(TAKEN, id=id_)

    monkeypatch.setattr(fleet, "guests", found)
    monkeypatch.setattr(preflight, "checked", checked)
    monkeypatch.setattr(preflight, "bounded", checked)
    monkeypatch.setattr(create, "take", take)
    monkeypatch.setattr(client, "run_order", agents)
    return agents
