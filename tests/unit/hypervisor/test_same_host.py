"""What libvirt is asked to tell one host under two names from two hosts."""

from dataclasses import dataclass, field
from typing import Any

import libvirt
import pytest

from vmckpt.hypervisor import connection, same_host
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.host import Host
from vmckpt.model.same_host import SameUuid

SECOND = 1_000_000_000


@dataclass
class Domain:
    uuid: str
    number: int

    def UUIDString(self) -> str:
        return self.uuid

    def ID(self) -> int:
        return self.number


@dataclass
class Machine:
    """A libvirtd, with counters that go on as it is asked."""

    uuid: str = "u"
    hostname: str = "alpha"
    up: int = 1000 * SECOND
    domains: list[Domain] = field(default_factory=lambda: [Domain("g-1", 3)])
    asked: int = 0

    def getCapabilities(self) -> str:
        self.asked += 1
        return f"<capabilities><host><uuid>{self.uuid}</uuid></host></capabilities>"

    def getHostname(self) -> str:
        return self.hostname

    def getCPUStats(self, _cpu: int) -> dict[str, int]:
        self.up += SECOND // 100
        return {
            "kernel": self.up // 10, "user": self.up // 5, "idle": self.up,
            "iowait": -self.up % SECOND,
        }  # fmt: skip

    def listAllDomains(self, _flags: int) -> list[Domain]:
        return self.domains

    def setKeepAlive(self, *_: int) -> None:
        pass

    def isAlive(self) -> int:
        return 1

    def close(self) -> None:
        pass


async def told(monkeypatch: pytest.MonkeyPatch, machines: dict[str, Any]) -> tuple[SameUuid, ...]:
    def opened(uri: str) -> Any:
        machine = machines[uri.partition("://")[2].partition("/")[0]]
        if machine is None:
            raise libvirt.libvirtError("no route to host")
        return machine

    monkeypatch.setattr(connection, "start", lambda: None)
    monkeypatch.setattr(libvirt, "open", opened)
    hosts = [Hypervisor(Host(name=name, uri=f"qemu+tcp://{name}/system")) for name in machines]
    try:
        return await same_host.among(hosts)
    finally:
        for host in hosts:
            await host.__aexit__()


async def test_one_libvirtd_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Machine()
    found = await told(monkeypatch, {"alpha": one, "alpha2": one, "beta": Machine(uuid="v")})

    assert found == (SameUuid(first="alpha", second="alpha2", one=True),)


async def test_three_names_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Machine()
    found = await told(monkeypatch, {"alpha": one, "alpha2": one, "alpha3": one})

    assert [(pair.first, pair.second, pair.one) for pair in found] == [
        ("alpha", "alpha2", True), ("alpha", "alpha3", True),
    ]  # fmt: skip


async def test_clones_are_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same UUID, the same name and the same guests, as of two clones of one image."""
    found = await told(monkeypatch, {"alpha": Machine(), "beta": Machine(up=9000 * SECOND)})

    assert [(pair.one, pair.why) for pair in found] == [
        (False, "they have used different amounts of CPU time since they started")
    ]


async def test_a_host_with_a_uuid_of_its_own_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Machine(uuid="v")
    assert await told(monkeypatch, {"alpha": Machine(), "beta": other}) == ()
    assert other.asked == 1


async def test_a_host_that_does_not_answer_may_be_any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await told(monkeypatch, {"alpha": Machine(), "beta": None})

    assert [(pair.first, pair.second, pair.one) for pair in found] == [("alpha", "beta", None)]
    assert "no route to host" in found[0].why


async def test_only_hosts_with_one_uuid_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [Hypervisor(Host(name=name, uri="test:///default")) for name in ("a", "b", "c")]
    compared: list[str] = []

    async def among(chosen: list[Hypervisor]) -> tuple[SameUuid, ...]:
        compared.extend(one.host.name for one in chosen)
        return ()

    monkeypatch.setattr(same_host, "among", among)
    await same_host.among_known(hosts, {"a": "u", "b": "v", "c": "u"})
    assert compared == ["a", "c"]
