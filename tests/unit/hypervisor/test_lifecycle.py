"""Guests are shut down, suspended and started, and why one has ended is heard of."""

from collections.abc import AsyncIterator, Iterator

import libvirt
import pytest
import pytest_asyncio

from tests.support import libvirt_host
from tests.support.libvirt_host import UUID
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domains, lifecycle
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.lifecycle import Ending, Endings
from vmckpt.model.guest import GuestState
from vmckpt.model.host import Host
from vmckpt.units import Seconds

SAVED, SUSPENDED = 4, 3
"""Of a guest that stopped, and another event: as libvirt numbers them."""
SHARED = "test:///default"
"""The host of libvirt's test driver that all connections of this process share."""


@pytest.fixture
def guest() -> Iterator[libvirt.virDomain]:
    """One that runs there, and is defined there as long as the test lasts."""
    made = libvirt.open(SHARED)
    domain = made.defineXML(libvirt_host.GUEST)
    domain.create()
    yield domain
    if domain.isActive():
        domain.destroy()
    domain.undefine()
    made.close()


@pytest_asyncio.fixture
async def alpha(guest: libvirt.virDomain) -> AsyncIterator[Hypervisor]:
    """The host with that guest."""
    del guest
    async with Hypervisor(Host(name="alpha", uri=SHARED)) as found:
        yield found


async def state(alpha: Hypervisor) -> GuestState | None:
    return (await domains.presence(alpha, UUID)).state


async def test_a_guest_is_shut_down_and_started_once(alpha: Hypervisor) -> None:
    assert await lifecycle.start(alpha, UUID) is None
    await lifecycle.shut_down(alpha, UUID, Seconds(5.0))
    assert await state(alpha) is GuestState.SHUT_OFF
    await lifecycle.shut_down(alpha, UUID, Seconds(5.0))
    assert await lifecycle.start(alpha, UUID) == "web1"
    assert await state(alpha) is GuestState.RUNNING


async def test_one_that_does_not_hear_is_asked_again_and_never_ended_by_force(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(libvirt.virDomain, "shutdown", lambda _: asked.append(1))
    monkeypatch.setattr(lifecycle, "_POLL", 0.01)
    monkeypatch.setattr(lifecycle, "_AGAIN", Seconds(0.05))
    with pytest.raises(HypervisorError, match="web1 on alpha did not shut down within"):
        await lifecycle.shut_down(alpha, UUID, Seconds(2.0))
    assert len(asked) >= 2
    assert await state(alpha) is GuestState.RUNNING


async def test_one_that_was_suspended_goes_on_from_its_memory(alpha: Hypervisor) -> None:
    assert not await lifecycle.is_saved(alpha, UUID)
    await lifecycle.suspend(alpha, UUID)
    assert await state(alpha) is GuestState.SHUT_OFF
    assert await lifecycle.is_saved(alpha, UUID)
    await lifecycle.start(alpha, UUID)
    assert not await lifecycle.is_saved(alpha, UUID)


async def test_a_guest_that_was_started_or_saved_meanwhile_is_not_moved(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[str, dict[str, str]]] = []

    def move(_: object, target: str, given: dict[str, str], __: int) -> None:
        moved.append((target, given))

    monkeypatch.setattr(libvirt.virDomain, "migrateToURI3", move)
    with pytest.raises(HypervisorError, match="web1 was started on alpha in the meantime"):
        await lifecycle.move_offline(alpha, UUID, "qemu+tls://beta/system")
    await lifecycle.suspend(alpha, UUID)
    with pytest.raises(HypervisorError, match="memory of web1 was saved on alpha in the meantime"):
        await lifecycle.move_offline(alpha, UUID, "qemu+tls://beta/system")
    assert moved == []
    await lifecycle.start(alpha, UUID)
    await lifecycle.shut_down(alpha, UUID, Seconds(5.0))
    await lifecycle.move_offline(alpha, UUID, "qemu+tls://beta/system", "<domain/>")
    assert moved == [("qemu+tls://beta/system", dict.fromkeys(moved[0][1], "<domain/>"))]
    assert len(moved[0][1]) == 2


def test_whoever_ends_a_guest_wished_for_it(guest: libvirt.virDomain) -> None:
    with Endings(UUID, uri=SHARED) as endings:
        assert endings.how(Seconds(0.05)) is Ending.DIED
        guest.destroy()
        assert endings.how(Seconds(5.0)) is Ending.WISHED


def test_of_a_libvirt_that_was_away_it_is_heard_again(guest: libvirt.virDomain) -> None:
    with Endings(UUID, uri=SHARED) as endings:
        assert endings._connection is not None
        endings._connection.close()
        endings._connection = None
        endings.keep()
        guest.destroy()
        assert endings.how(Seconds(5.0)) is Ending.WISHED


@pytest.mark.parametrize(
    ("event", "detail", "ending"),
    [
        (libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED, Ending.DIED),
        (
            libvirt.VIR_DOMAIN_EVENT_STOPPED,
            SAVED,
            Ending.WISHED,
        ),
        (libvirt.VIR_DOMAIN_EVENT_CRASHED, 0, Ending.WISHED),
        (SUSPENDED, 0, Ending.DIED),
    ],
)
def test_a_guest_that_died_was_not_ended(event: int, detail: int, ending: Ending) -> None:
    endings = Endings(UUID, uri=SHARED)
    endings._take(None, None, event, detail, None)
    assert endings.how(Seconds(0.0)) is ending


def test_devices_are_told_to_whoever_listens() -> None:
    endings, told = Endings(UUID, uri=SHARED), list[tuple[str, bool]]()
    endings._plugged_in(None, None, "net0", None)
    endings.on_device = lambda name, plugged: told.append((name, plugged))
    endings._plugged_in(None, None, "net1", None)
    endings._plugged_out(None, None, "net1", None)
    assert told == [("net1", True), ("net1", False)]
