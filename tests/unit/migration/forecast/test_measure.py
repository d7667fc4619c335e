import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.support.builders import GUEST, HOST
from tests.support.worlds import facts, policy
from vmckpt.errors import HypervisorError, RemoteError
from vmckpt.hypervisor import dirty_rate
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migration.forecast import history, tracked_writes
from vmckpt.migration.forecast.forecast import Facts, forecast
from vmckpt.migration.forecast.measure import Links, measure, worthwhile_probe
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.model.migration import DirtyPoint, LinkSeen, MemorySeen, Mode
from vmckpt.remote import measure as remote
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds


def points(*seen: tuple[float, float]) -> tuple[DirtyPoint, ...]:
    return tuple(DirtyPoint(time=Seconds(t), dirtied=u * MIB, error=0.1 * MIB) for t, u in seen)


def after_a_second(u: float, **wishes: float) -> Facts:
    known = facts(512, 300, bandwidth=wishes.get("bandwidth", 20))
    return replace(known, dirty=points((0.5, u / 2), (1.0, u)))


WORTH = [
    # The first pass lasts 15 s: look as long as may be, or as long as that.
    (after_a_second(20), 10, 10),
    (after_a_second(20), 60, 300 / (20 * 0.98)),
    # A second is all there is to look at.
    (after_a_second(20), 1, None),
    (after_a_second(20, bandwidth=280), 60, None),
    # It writes next to nothing.
    (after_a_second(1), 60, None),
    # It has levelled off.
    (replace(facts(512, 300, bandwidth=20), dirty=points((0.5, 40), (1.0, 40))), 60, None),
    # Nothing is known of it.
    (replace(facts(512, 300, bandwidth=20), dirty=()), 60, None),
]


@pytest.mark.parametrize(("known", "probe", "longer"), WORTH)
def test_a_second_look_is_worth(known: Facts, probe: float, longer: float | None) -> None:
    found = worthwhile_probe(known, policy(), Seconds(probe))

    assert found == (None if longer is None else pytest.approx(longer, rel=0.01))


def test_a_limit_makes_the_first_pass_longer_and_a_second_look_worthwhile() -> None:
    known = after_a_second(20, bandwidth=280)

    assert worthwhile_probe(known, policy(bandwidth=10), Seconds(5)) == Seconds(5)


HERE = cast("Hypervisor", type("Fake", (), {"host": HOST})())
LOGINS = cast("Remotes", (object(), object()))
LINK = LinkSeen(rate=BytesPerSecond(50 * MIB), received=Bytes(25 * MIB), lasted=Seconds(0.5))
MEMORY = MemorySeen(
    size=GUEST.memory, resident=200.0 * MIB, in_use=100.0 * MIB, error=1.0 * MIB,
    dirtied=points((0.5, 5), (1.0, 10)), tail=((256.0 * MIB, 100.0 * MIB),), samples=16384,
)  # fmt: skip


class World:
    """What the hosts answer; an exception is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {
            "link": LINK, "memory": MEMORY, "resident": Bytes(120 * MIB),
            "dirtied": DirtyPoint(time=Seconds(1.0), dirtied=9.0 * MIB, error=4.0 * MIB),
            "process": Bytes(180 * MIB),
            "count": RemoteError("alpha: vmckpt-agent is not installed"),
        }  # fmt: skip
        for name in ("link", "memory", "resident"):
            monkeypatch.setattr(remote, name, self.replies(name))
        monkeypatch.setattr(tracked_writes, "count", self.replies("count"))
        monkeypatch.setattr(dirty_rate, "dirtied", self.replies("dirtied"))
        monkeypatch.setattr(dirty_rate, "resident", self.replies("process"))

    def replies(self, name: str) -> Callable[..., Any]:
        async def reply(*args: Any) -> Any:
            self.asked.append((name, args[-1]))
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return reply


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def look(probe: float = 1.0, remotes: Remotes | None = LOGINS) -> Facts:
    return await measure(HERE, HERE, GUEST, policy(), [], probe=Seconds(probe), remotes=remotes)


@pytest.mark.usefixtures("world")
async def test_everything_that_can_be_measured_is() -> None:
    known = await look()

    assert known.in_use.covers(100.5 * MIB)
    assert known.in_use.width < 0.03
    assert known.bandwidth.covers(49 * MIB)
    assert len(known.dirty) == 2
    assert known.basis[0] == "100 MiB of 256 MiB in use, from 16384 sampled pages"
    assert forecast(known, policy(), Mode.PRECOPY, GUEST).converges is True


async def test_several_plans_measure_a_network_once_and_never_two_at_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once: list[set[str]] = []
    busy: set[str] = set()

    async def link(source: str, target: str, _: str) -> LinkSeen:
        assert not busy & {source, target}
        busy.update((source, target))
        at_once.append(set(busy))
        await asyncio.sleep(0.01)
        busy.difference_update((source, target))
        return LINK

    monkeypatch.setattr(remote, "link", link)
    hosts = {name: replace(HOST, name=name) for name in "abcd"}
    links = Links()

    async def between(source: str, target: str) -> None:
        logins = cast("Remotes", (source, target))
        assert await links.between(hosts[source], hosts[target], logins) == (LINK, None)

    await asyncio.gather(*(between(*pair) for pair in ("ab", "ac", "ab", "ba", "cd", "ac")))
    assert len(at_once) == 4
    assert {"a", "b", "c", "d"} in at_once


async def test_where_pages_cannot_be_seen_others_are_asked(world: World) -> None:
    world.answers["memory"] = RemoteError("alpha: no python3 there to measure with")

    known = await look()

    assert known.in_use.high == 120 * MIB
    assert known.dirty[0].dirtied == 9 * MIB
    assert "no python3" in known.basis[0]


async def test_without_ssh_libvirt_is_asked(world: World) -> None:
    known = await look(remotes=None)

    assert known.in_use.high == 180 * MIB
    assert known.link is None
    assert "link" not in [name for name, _ in world.asked]


async def test_where_nothing_answers_the_ranges_are_wide(world: World) -> None:
    world.answers = dict.fromkeys(world.answers, RemoteError("gone"))
    world.answers |= dict.fromkeys(("dirtied", "process"), HypervisorError("gone", host="alpha"))

    known = await look()

    assert known.in_use.high == GUEST.memory
    assert known.dirty == ()
    assert known.setup == history.SETUP
    assert "link not measured: gone" in known.basis
    assert forecast(known, policy(), Mode.PRECOPY, GUEST).converges is None


async def test_a_probe_of_no_time_does_not_look_at_what_is_written(world: World) -> None:
    world.answers["memory"] = replace(MEMORY, dirtied=())

    known = await look(probe=0)

    assert world.asked == [("link", HOST.ssh and HOST.ssh.address), ("memory", [])]
    assert not any("track" in one for one in known.basis)
    assert known.dirty == ()


async def test_a_guest_that_goes_on_writing_is_looked_at_longer(world: World) -> None:
    world.answers["memory"] = replace(MEMORY, dirtied=points((0.5, 20), (1.0, 40)))

    await look(probe=60)

    times = [asked for name, asked in world.asked if name == "memory"]
    assert len(times) == 2
    # Never longer than the first pass of about two seconds.
    assert 1.5 < times[1][-1] < 2.3


async def test_pages_are_counted_where_writes_can_be_tracked(world: World) -> None:
    world.answers["count"] = points((0.1, 3), (0.3, 6))

    known = await look()

    assert known.dirty == world.answers["count"]
    assert known.in_use.width < 0.03
    assert known.basis[1] == "6.0 MiB written within 300 ms (20 MiB/s), counted by write tracking"
    assert not any("sampled pages" in one for one in known.basis[1:])


async def test_the_reason_for_samples_is_told(world: World) -> None:
    known = await look()

    assert known.dirty == MEMORY.dirtied
    assert "writes not tracked: alpha: vmckpt-agent is not installed" in known.basis
    assert "from sampled pages" in known.basis[1]


async def test_counts_need_no_samples(world: World) -> None:
    world.answers["memory"] = RemoteError("alpha: no python3 there to measure with")
    world.answers["count"] = points((0.1, 3), (0.3, 6))

    known = await look()

    assert known.in_use.high == 120 * MIB
    assert known.dirty == world.answers["count"]
    assert "dirtied" not in [name for name, _ in world.asked]


async def test_a_guest_whose_writes_are_tracked_is_tracked_longer(world: World) -> None:
    world.answers["count"] = points((0.3, 12), (0.5, 20))

    known = await look(probe=60)

    limits = [asked for name, asked in world.asked if name == "count"]
    assert len(limits) == 2
    assert limits[1] > limits[0]
    assert [name for name, _ in world.asked].count("memory") == 1
    # The second count says nothing new here.
    assert known.dirty == world.answers["count"]


async def test_a_short_count_is_long_enough_for_a_short_probe(world: World) -> None:
    """Where the agent started late, the guest is not measured for another second."""
    world.answers["count"] = points((0.1, 4), (0.3, 12))

    await look(probe=1)

    assert [name for name, _ in world.asked].count("count") == 1
