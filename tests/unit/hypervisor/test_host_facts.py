"""What a host's libvirt says about the host, in one visit or polled."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import libvirt
import pytest
import pytest_asyncio

from tests.support import libvirt_host
from tests.support.libvirt_host import UUID
from vmckpt.hypervisor import domains, host_facts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.host_facts import HostPoller
from vmckpt.model.guest import GuestState
from vmckpt.model.host import GuestOnHost
from vmckpt.units import GIB, Seconds


@pytest_asyncio.fixture
async def alpha(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hypervisor]:
    """A host of libvirt's test driver, which does not count memory."""
    memory = {"total": 8 << 20, "free": 3 << 20, "buffers": 0, "cached": 1 << 20}
    monkeypatch.setattr(libvirt.virConnect, "getMemoryStats", lambda *_: memory)
    host = replace(libvirt_host.host(tmp_path), labels={"rack": "1"})
    async with Hypervisor(host) as found:
        yield found


async def test_one_visit_brings_everything(alpha: Hypervisor) -> None:
    found = await host_facts.host_facts(alpha)
    assert (found.memory, found.memory_free, found.cpus) == (8 * GIB, 4 * GIB, 2)
    assert found.guests == (GuestOnHost(name="web1", uuid=UUID, state=GuestState.RUNNING),)
    assert found.networks <= {"default"}


async def test_a_poll_tells_of_the_host_and_its_guests(alpha: Hypervisor) -> None:
    host, (guest,) = await HostPoller(alpha).poll()
    assert (host.name, host.memory, host.free) == ("alpha", 8 * GIB, 4 * GIB)
    assert (host.busy, host.labels) == (None, {"rack": "1"})
    assert (guest.name, guest.host, guest.state) == ("web1", "alpha", GuestState.RUNNING)


async def test_a_guest_is_described_again_only_if_its_state_is_new_or_it_was_long_ago(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, count = domains.described, list[str]()

    def counted(domain: libvirt.virDomain) -> Any:
        count.append(domain.name())
        return described(domain)

    monkeypatch.setattr(domains, "described", counted)
    poller = HostPoller(alpha)
    for _ in range(3):
        await poller.poll()
    assert len(count) == 1
    await domains.end(alpha, UUID)
    _, (guest,) = await poller.poll()
    assert (len(count), guest.state) == (2, GuestState.SHUT_OFF)
    monkeypatch.setattr(host_facts, "_STALE", Seconds(-1.0))
    await poller.poll()
    assert len(count) == 3


async def test_how_busy_it_is_is_what_was_done_since_the_last_look(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter(
        [
            {"user": 10, "kernel": 0, "idle": 90, "iowait": 0},
            {"user": 30, "kernel": 10, "idle": 120, "iowait": 40},
            {"user": 30, "kernel": 10, "idle": 120, "iowait": 40},
        ]
    )
    monkeypatch.setattr(libvirt.virConnect, "getCPUStats", lambda *_: next(told))
    poller = HostPoller(alpha)
    assert [(await poller.poll())[0].busy for _ in range(3)] == [
        None, pytest.approx(0.3), None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        (libvirt.VIR_CPU_COMPARE_INCOMPATIBLE, False),
        (libvirt.VIR_CPU_COMPARE_SUPERSET, True),
        (libvirt.VIR_CPU_COMPARE_IDENTICAL, True),
        (-1, None),
    ],
)
async def test_a_cpu_fits_if_libvirt_says_so(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch, answer: int, fits: bool | None
) -> None:
    guest = await domains.find_guest(alpha, "web1")
    assert guest is not None
    named = replace(guest, cpu_xml="<cpu mode='custom'/>", cpu_mode="custom")
    assert await host_facts.cpu_fits(alpha, named) is None  # this driver compares none
    monkeypatch.setattr(libvirt.virConnect, "compareHypervisorCPU", lambda *_: answer)
    assert await host_facts.cpu_fits(alpha, named) is fits
    assert await host_facts.cpu_fits(alpha, replace(named, cpu_mode="host-passthrough")) is None
