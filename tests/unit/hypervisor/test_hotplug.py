"""Devices are unplugged and plugged in live, in libvirt's own words."""

from collections.abc import Callable
from typing import Any, TypeVar

import libvirt
import pytest

from vmckpt.hypervisor import hotplug

T = TypeVar("T")


class Refused(libvirt.libvirtError):
    def __init__(self, code: int) -> None:
        super().__init__("no")
        self.code = code

    def get_error_code(self) -> int:
        return self.code


class Domain:
    """A guest, its connection, and a libvirt network."""

    def __init__(self, run: int = 3) -> None:
        self.run, self.active, self.error = run, 1, 0
        self.done: list[tuple[str, str, int]] = []

    def detachDeviceFlags(self, text: str, flags: int) -> int:
        self.done.append(("detach", text, flags))
        return 0

    def attachDeviceFlags(self, text: str, flags: int) -> int:
        self.done.append(("attach", text, flags))
        return 0

    def connect(self) -> "Domain":
        return self

    def networkLookupByName(self, name: str) -> "Domain":
        assert name == "default"
        if self.error:
            raise Refused(self.error)
        return self

    def isActive(self) -> int:
        return self.active


class Caller:
    host = "alpha"

    def __init__(self, domain: Domain) -> None:
        self.domain: Any = domain
        self.changed: list[bool] = []

    def on_domain(
        self, what: str, call: Callable[[libvirt.virDomain], T], *, changes: bool = False
    ) -> T:
        assert what
        self.changed.append(changes)
        return call(self.domain)


def test_only_the_running_guest_is_changed() -> None:
    domain = Domain()
    caller = Caller(domain)
    hotplug.unplug(caller, "<old/>")
    hotplug.plug(caller, "<new/>")
    live = libvirt.VIR_DOMAIN_AFFECT_LIVE
    assert domain.done == [("detach", "<old/>", live), ("attach", "<new/>", live)]
    assert caller.changed == [True, True]


@pytest.mark.parametrize(("run", "told"), [(3, 3), (-1, None)])
def test_a_run_has_an_id(monkeypatch: pytest.MonkeyPatch, run: int, told: int | None) -> None:
    monkeypatch.setattr(libvirt.virDomain, "ID", lambda domain: domain.run)
    assert hotplug.run_id(Caller(Domain(run))) == told


def test_a_network_that_is_gone_or_off_is_not_active() -> None:
    domain = Domain()
    caller = Caller(domain)
    assert hotplug.network_is_active(caller, "default")
    domain.active = 0
    assert not hotplug.network_is_active(caller, "default")
    domain.error = libvirt.VIR_ERR_NO_NETWORK
    assert not hotplug.network_is_active(caller, "default")
    domain.error = libvirt.VIR_ERR_RPC
    with pytest.raises(libvirt.libvirtError):
        hotplug.network_is_active(caller, "default")
    assert caller.changed == [False] * 4
