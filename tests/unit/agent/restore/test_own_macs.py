"""MAC addresses of a running fork: changed by its guest agent, and believed only from QEMU."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import libvirt
import libvirt_qemu
import pytest

from tests.support.restore_orders import order as an_order
from vmckpt.agent import resumed_guest
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.restore import own_macs
from vmckpt.agent.restore.own_macs import Change, MacResult
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.guest_agent import CHANNEL
from vmckpt.units import Seconds

T = TypeVar("T")
OLD, NEW, VLAN = "52:54:00:00:00:01", "52:54:00:00:00:02", "52:54:00:00:00:03"


def definition(mac: str, *, agent: bool = True) -> str:
    channel = f"<channel type='unix'><target name='{CHANNEL}'/></channel>" if agent else ""
    return (
        f"<domain><devices>{channel}<interface type='bridge'><mac address='{mac}'/>"
        "<alias name='net0'/></interface></devices></domain>"
    )


class Guest:
    """A fork whose agent answers, with these interfaces."""

    interfaces: ClassVar[dict[str, str]] = {}
    physical: ClassVar[set[str]] = set()
    addresses: ClassVar[list[dict[str, Any]]] = []
    reports: ClassVar[bool] = True
    """Whether the card is a virtio card, whose address QEMU reports."""
    answers: ClassVar[bool] = True
    status: ClassVar[int] = 0
    obeys: ClassVar[bool] = True
    programs: ClassVar[list[str]] = ["ip", "test"]
    ran: ClassVar[list[list[str]]] = []

    host, name = "alpha", "fork"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def described(self) -> str:
        return definition(NEW)

    def ask(self, command: str) -> list[dict[str, str]]:
        assert command == "query-rx-filter"
        return [{"name": "net0", "main-mac": self.interfaces["eth0"]}] if self.reports else []

    def on_domain(self, what: str, call: Callable[[Any], T], *, changes: bool = False) -> T:
        assert not changes
        return call(self)

    def command(self, text: str) -> Any:
        told = json.loads(text)
        given = told.get("arguments", {})
        match told["execute"]:
            case "guest-ping":
                if not self.answers:
                    code = libvirt.VIR_ERR_AGENT_UNRESPONSIVE
                    raise HypervisorError("no agent", host="alpha", code=code)
                return {}
            case "guest-network-get-interfaces":
                return [
                    {"name": name, "hardware-address": mac.upper(), "ip-addresses": self.addresses}
                    for name, mac in self.interfaces.items()
                ]
            case "guest-exec":
                return self.run(given["path"], given["arg"])
            case _:
                said = base64.b64encode(b"RTNETLINK answers: no\n").decode()
                status = self.status if given["pid"] < 2 else given["pid"] - 2
                return {"exited": True, "exitcode": status, "err-data": said}

    def run(self, program: str, words: list[str]) -> dict[str, int]:
        if program not in self.programs:
            raise HypervisorError(f"{program} not found", host="alpha")
        self.ran.append([program, *words])
        if program == "test":
            name = words[1].split("/")[4]
            return {"pid": 2 if name in self.physical else 3}
        assert words[:3] == ["link", "set", "dev"]
        if self.status == 0 and self.obeys:
            self.interfaces[words[3]] = words[5]
        return {"pid": 1}


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RestoreOrder:
    for name, value in (
        ("interfaces", {"eth0": OLD}), ("physical", {"eth0"}), ("ran", []),
        ("addresses", [{"ip-address": "10.0.0.5", "prefix": 24},
                       {"ip-address": "fe80::1%eth0", "prefix": 64}]),
    ):  # fmt: skip
        monkeypatch.setattr(Guest, name, value)
    monkeypatch.setattr(own_macs, "QmpMonitor", Guest)
    monkeypatch.setattr(resumed_guest, "_ANSWERS", Seconds(0.0))
    monkeypatch.setattr(
        libvirt_qemu, "qemuAgentCommand",
        lambda guest, text, *_: json.dumps({"return": guest.command(text)}),
    )  # fmt: skip
    return replace(an_order(tmp_path), links_down=True)


def give(order: RestoreOrder) -> MacResult:
    return own_macs.give_own_macs(order, definition(OLD))


def test_the_agent_changes_the_address_that_the_guest_still_has(order: RestoreOrder) -> None:
    assert give(order) == MacResult(addresses=("10.0.0.5/24 (eth0)",))
    assert Guest.ran == [["ip", "link", "set", "dev", "eth0", "address", NEW]]
    assert give(order) == MacResult(), "nothing is left to change"


def test_a_card_that_qemu_does_not_report_is_believed_from_the_guest(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guest, "reports", False)
    assert not give(order).kept
    assert Guest.interfaces == {"eth0": NEW}


def test_a_vlan_has_the_address_of_its_card_and_follows_it(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guest, "interfaces", {"eth0": OLD, "eth0.7": OLD})
    assert not give(order).kept
    assert Guest.ran[-1][4:] == ["eth0", "address", NEW]


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("answers", False, "its guest agent does not answer"),
        ("status", 2, f"ip link set dev eth0 address {NEW}: RTNETLINK answers: no"),
        ("obeys", False, f"network card net0 still has {OLD}"),
        ("programs", [], "the guest agent cannot run ip: ip not found"),
    ],
)
def test_an_address_that_was_not_changed_is_named(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch, attribute: str, value: Any, why: str
) -> None:
    monkeypatch.setattr(Guest, attribute, value)
    assert give(order).kept == why


def test_the_address_to_change_is_the_one_that_qemu_reports(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guest, "interfaces", {"eth0": VLAN})  # not that of the original's XML
    assert not give(order).kept
    assert Guest.interfaces == {"eth0": NEW}


def test_the_interface_must_be_known(order: RestoreOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guest, "reports", False)
    monkeypatch.setattr(Guest, "interfaces", {"eth0": VLAN})
    assert give(order).kept == f"no network interface in the guest has the MAC address {OLD}"
    monkeypatch.setattr(Guest, "interfaces", {"eth0": OLD, "eth1": OLD})
    monkeypatch.setattr(Guest, "physical", {"eth0", "eth1"})
    assert "more than one interface" in give(order).kept


def test_without_an_agent_or_while_paused_nothing_is_tried(order: RestoreOrder) -> None:
    assert own_macs.give_own_macs(replace(order, paused=True), definition(OLD)).kept
    assert "no guest agent" in own_macs.give_own_macs(order, definition(OLD, agent=False)).kept
    assert own_macs.give_own_macs(order, "<domain/>") == MacResult()
    assert Guest.ran == []


def test_the_message_has_the_commands_that_connect_the_fork(order: RestoreOrder) -> None:
    said = own_macs.kept_macs(order, "its guest agent does not answer")
    assert "because its guest agent does not answer; their links stay down" in said
    assert said.endswith(f"virsh destroy fork; virsh start fork; virsh domif-setlink fork {NEW} up")


def test_ip_addresses_are_a_warning_until_they_are_changed(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = give(order)
    (said,) = own_macs.same_addresses(order, before)
    assert said.startswith("fork has the IP addresses of its original: 10.0.0.5/24 (eth0)")
    monkeypatch.setattr(Guest, "addresses", [{"ip-address": "10.0.0.6", "prefix": 24}])
    assert list(own_macs.same_addresses(order, before)) == []
    assert list(own_macs.same_addresses(order, MacResult())) == []


def test_cards_are_compared_with_what_qemu_reports() -> None:
    cards = [("net0", NEW), ("net1", VLAN)]
    assert own_macs.needed(cards, [OLD, OLD], {"net0": NEW}) == (Change("net1", OLD, VLAN),)
    assert own_macs.needed(cards, [NEW, VLAN], {}) == ()
