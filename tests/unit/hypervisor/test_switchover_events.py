"""The downtime of a post-copy migration, by libvirt's events."""

from typing import Any

import libvirt
import pytest

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import switchover_events
from vmckpt.hypervisor.switchover_events import SwitchoverEvents

PAUSED, RESUMED = libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_RESUMED


class Domain:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid

    def UUIDString(self) -> str:
        return self.uuid


class Times:
    """The clock, set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Times:
    made = Times()
    monkeypatch.setattr(switchover_events, "time", made)
    return made


Told = tuple[float, str, int]


def downtime(clock: Times, *events: Told, uuid: str = "u") -> float | None:
    seen = SwitchoverEvents("u")
    for at, side, event in events:
        clock.now = at
        take = seen.on_source if side == "source" else seen.on_target
        take(None, Domain(uuid), event, 0, None)
    return seen.downtime


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([(5.0, "source", PAUSED), (5.25, "target", RESUMED)], 0.25),
        # A switchover that failed was undone before.
        ([(1.0, "source", PAUSED), (5.0, "source", PAUSED), (5.25, "target", RESUMED)], 0.25),
        # A stream that broke pauses both sides once more.
        (
            [
                (5.0, "source", PAUSED), (5.25, "target", RESUMED), (7.0, "source", PAUSED),
                (7.0, "target", PAUSED), (9.0, "target", RESUMED),
            ],
            0.25,
        ),
        ([(5.0, "source", PAUSED)], None),
        ([(5.25, "target", RESUMED)], None),
        ([(5.0, "source", PAUSED), (5.1, "source", RESUMED)], None),
        ([], None),
    ],
)  # fmt: skip
def test_it_lasts_from_the_pause_to_the_resume(
    clock: Times, events: list[Told], expected: float | None
) -> None:
    assert downtime(clock, *events) == expected


def test_events_of_other_guests_do_not_count(clock: Times) -> None:
    told = (5.0, "source", PAUSED), (5.25, "target", RESUMED)
    assert downtime(clock, *told, uuid="v") is None


class Connection:
    def __init__(self) -> None:
        self.listeners: dict[int, Any] = {}

    def domainEventRegisterAny(self, _: object, kind: int, take: Any, __: object) -> int:
        assert kind == libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
        self.listeners[len(self.listeners)] = take
        return len(self.listeners) - 1

    def domainEventDeregisterAny(self, number: int) -> None:
        del self.listeners[number]


class Host:
    """A host that answers, or refuses."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.connection = Connection()
        self._refuses = refuses

    async def query(self, _: str, call: Any) -> Any:
        if self._refuses:
            raise HypervisorError("alpha: no", host="alpha")
        return call(self.connection)


async def test_it_listens_on_both_hosts_and_no_longer_than_the_move(clock: Times) -> None:
    source: Any = Host()
    target: Any = Host()
    seen = SwitchoverEvents("u")
    async with seen.recorded(source, target):
        clock.now = 5.0
        source.connection.listeners[0](None, Domain("u"), PAUSED, 0, None)
        clock.now = 5.5
        target.connection.listeners[0](None, Domain("u"), RESUMED, 0, None)

    assert seen.downtime == 0.5
    assert (source.connection.listeners, target.connection.listeners) == ({}, {})


async def test_a_host_that_refuses_stops_no_move() -> None:
    seen = SwitchoverEvents("u")
    refusing: Any = Host(refuses=True)
    target: Any = Host()
    async with seen.recorded(refusing, target):
        pass
    assert seen.downtime is None
