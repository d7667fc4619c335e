"""The made-up fleet and the replayed trace that a dashboard can show instead of real hosts."""

import time
from collections.abc import Sequence

import pytest

from tests.support.clocks import Clock
from tests.support.hint_inventory import inventory
from tests.support.hint_situations import situations
from vmckpt.errors import BadInput
from vmckpt.journal.jobs import JobView
from vmckpt.journal.records import StoredEvent, StoredSample
from vmckpt.model.guest import FleetNow, GuestNow, GuestState
from vmckpt.protection import status
from vmckpt.simulation import fleet as fleets
from vmckpt.simulation.source import Showing

WIDTH = 80


def showing(hosts: int = 24, guests: int = 300, jobs: int = 3) -> tuple[Showing, Clock]:
    clock = Clock()
    return Showing(hosts, guests, jobs, 1, clock), clock


def host_of(fleet: FleetNow, guest: str) -> list[str]:
    return [one.host for one in fleet.guests if one.name == guest]


async def idle(shown: Showing) -> tuple[GuestNow, str]:
    """A guest that runs and has no job, and a host with room for it."""
    fleet, jobs = await shown.fleet(), await shown.jobs(0)
    busy = {one.operation.guest for one in jobs}
    emptied = {one.operation.source for one in jobs if one.operation.kind == "evacuate"}
    guest = next(
        one for one in fleet.guests
        if one.state is GuestState.RUNNING and one.name not in busy and one.host not in emptied
    )  # fmt: skip
    open_ = [one for one in fleet.hosts if not one.closed and not one.error]
    target = max((one for one in open_ if one.name != guest.host), key=lambda one: one.free)
    return guest, target.name


async def of_kind(shown: Showing, kind: str, ended: int = 0) -> list[JobView]:
    return [one for one in await shown.jobs(ended) if one.operation.kind == kind]


def test_no_hint_names_a_command_because_a_shell_sees_no_simulated_fleet() -> None:
    aside = situations().not_hints
    named = [text for text, hint in inventory().items()
             if text not in aside and any("simulation" in one for one in hint.places)]  # fmt: skip
    assert named == []


BAD = ("", "24", "x", "24x", "-1x3", "1e3x2", "10001x1", "1x200001", "0x3", "1x2x3", "9" * 50)


def test_a_fleet_is_written_as_hosts_and_guests() -> None:
    assert fleets.parsed("24x300") == (24, 300)
    assert fleets.parsed(" 0x0 ") == (0, 0)


@pytest.mark.parametrize("text", BAD)
def test_other_texts_are_refused_in_one_line_with_a_mend(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        fleets.parsed(text)

    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(("hosts", "guests"), [(0, 0), (1, 0), (1, 40), (5, 3), (24, 300)])
def test_hosts_have_room_for_their_guests(hosts: int, guests: int) -> None:
    fleet = fleets.made(hosts, guests, 1)

    assert (len(fleet.hosts), len(fleet.guests)) == (hosts, guests)
    assert len({one.name for one in fleet.guests}) == guests
    for host in fleet.hosts:
        there = [one for one in fleet.guests if one.host == host.name and one.state.is_active]
        assert 0 <= host.free <= host.memory - sum(one.memory for one in there)
    many = hosts >= 6
    assert [bool(one.error) for one in fleet.hosts].count(True) == many
    assert [bool(one.closed) for one in fleet.hosts].count(True) == many


async def test_the_same_seed_and_clock_show_the_same_however_often_somebody_looks() -> None:
    (one, clock), (other, later) = showing(), showing()
    for _ in range(30):
        clock.now += 5.0
        await one.jobs(5)
    later.now = clock.now

    assert list(await one.jobs(50)) == list(await other.jobs(50))
    assert await one.fleet() == await other.fleet()
    assert await one.protections() == await other.protections()
    assert await one.snapshots() == await other.snapshots()


async def test_something_is_going_on_and_something_has_ended_from_the_beginning() -> None:
    shown, _ = showing()
    kinds = [one.operation.kind for one in await shown.jobs(0)]
    ended = [one for one in await shown.jobs(20) if not one.operation.active]

    assert (kinds.count("evacuate"), kinds.count("protect")) == (1, 2)
    assert kinds.count("migrate") >= 3
    assert len([one for one in ended if one.operation.report]) == len(ended) > 0
    assert shown.title == "a simulation: 24 hosts, 300 guests"
    assert len(await shown.snapshots()) == 20


async def test_news_are_exactly_what_is_new() -> None:
    shown, clock = showing()
    clock.now += 1.0
    id_ = (await of_kind(shown, "migrate"))[0].operation.id
    events: list[StoredEvent] = []
    samples: list[StoredSample] = []
    active = True
    while active:
        found = await shown.news(id_, len(events), len(samples))
        events += found.events
        samples += found.samples
        active = found.view.operation.active
        again = await shown.news(id_, len(events), len(samples))
        assert (list(again.events), list(again.samples)) == ([], [])
        clock.now += 0.7
    whole = await shown.job(id_)

    assert events == list(whole.events)
    assert samples == list(whole.samples)
    assert events[-1].values == {"phase": "done"}


async def test_an_evacuation_goes_on_to_its_end() -> None:
    shown, clock = showing()
    (one,) = await of_kind(shown, "evacuate")
    id_, host = one.operation.id, one.operation.source
    going = one.operation.detail["moves"]
    running = []
    while (await shown.job(id_)).view.operation.active:
        running.append([part.operation.active for part in await shown.parts(id_)].count(True))
        clock.now += 3.0
    report = (await shown.job(id_)).view.operation.report or {}

    assert max(running) == 2
    assert report["outcome"] == "completed"
    assert {move["guest"] for move in report["moved"]} == {move["guest"] for move in going}
    assert {part.operation.detail["part_of"] for part in await shown.parts(id_)} == {id_}
    assert host not in {guest.host for guest in (await shown.fleet()).guests}
    events = (await shown.job(id_)).events
    assert [event.seq for event in events] == [*range(1, 2 * len(going) + 1)]


async def test_protections_are_told_as_their_agents_tell_it() -> None:
    shown, clock = showing()
    ready, entries = [], await shown.protections()
    for _ in range(10):
        entries = await shown.protections()
        looks = [status.parse_status(entry) for entry in entries.values()]
        ready.append(tuple(look.ready for look in looks))
        told = [tuple(entry["standby"].values()) for entry in entries.values()]
        assert told == [(look.ready, look.ready_why) for look in looks]
        clock.now += 20.0

    assert {first for first, _ in ready} == {True}
    assert {second for _, second in ready} == {True, False}
    assert entries.keys() == {one.operation.id for one in await of_kind(shown, "protect")}


async def test_a_migration_that_is_begun_shows_up_and_moves_the_guest() -> None:
    shown, clock = showing()
    guest, target = await idle(shown)
    begun = shown.start(["migrate", guest.name, "--to", target, "--policy", "wan"], WIDTH)
    assert begun.said().code is None
    (job,) = [one for one in await of_kind(shown, "migrate") if one.operation.guest == guest.name]

    assert (job.operation.target, job.operation.policy) == (target, "wan")
    assert sorted(host_of(await shown.fleet(), guest.name)) == sorted([guest.host, target])
    clock.now += 120.0
    assert begun.said().code == 0
    assert host_of(await shown.fleet(), guest.name) == [target]
    assert (await shown.job(job.operation.id)).view.operation.outcome == "completed"


async def test_a_migration_that_is_cancelled_leaves_the_guest_where_it_was() -> None:
    shown, clock = showing()
    guest, target = await idle(shown)
    before = {one.name: one.free for one in (await shown.fleet()).hosts}[target]
    begun = shown.start(["migrate", guest.name, "--to", target], WIDTH)
    clock.now += 4.0
    assert shown.start(["cancel", guest.name], WIDTH).said().code == 0
    clock.now += 2.0

    assert begun.said().code == 130
    begun.stop()
    assert host_of(await shown.fleet(), guest.name) == [guest.host]
    after = {one.name: one.free for one in (await shown.fleet()).hosts}[target]
    assert after == before


async def test_an_evacuation_can_be_paused_and_ended() -> None:
    shown, clock = showing()
    (one,) = await of_kind(shown, "evacuate")
    id_ = one.operation.id
    shown.start(["pause", id_], WIDTH)
    clock.now += 60.0
    assert not [part for part in await shown.parts(id_) if part.operation.active]
    assert (await shown.job(id_)).view.operation.active
    shown.start(["resume", id_], WIDTH)
    assert [part for part in await shown.parts(id_) if part.operation.active]
    shown.start(["cancel", id_], WIDTH)
    clock.now += 60.0
    report = (await shown.job(id_)).view.operation.report or {}

    assert report["outcome"] == "cancelled"
    assert report["left"]


async def test_a_protection_ends_with_a_failover_and_the_guest_runs_on_its_backup() -> None:
    shown, _ = showing()
    entry, other = (await shown.protections()).values()
    assert shown.start(["failover", entry["guest"], "--planned"], WIDTH).said().code == 0
    assert shown.start(["unprotect", other["guest"]], WIDTH).said().code == 0
    assert not await shown.protections()
    fleet = await shown.fleet()

    assert host_of(fleet, entry["guest"]) == [entry["backup"]]
    assert host_of(fleet, other["guest"]) == [other["primary"]]
    reports = [one.operation.report or {} for one in await of_kind(shown, "protect", ended=2)]
    assert {"failed_over", "unprotected"} <= {key for report in reports for key in report}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["migrate", "nobody", "--to", "r01-n01"], 2),
        (["migrate", "web-001", "--to", "nowhere"], 2),
        (["migrate", "web-001", "--to", "r02-n05"], 21),
        (["evacuate", "r02-n05", "--yes"], 21),
        (["set", "m-none", "--bandwidth", "1gbit"], 2),
        (["cancel", "r02-n05"], 2), (["unprotect", "nobody"], 2), (["snapshot"], 2), ([], 2),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_said_in_one_line(words: Sequence[str], code: int) -> None:
    shown, _ = showing()
    said = shown.start(words, WIDTH).said()

    assert said.code == code
    assert len(said.text.splitlines()) == 1


async def test_commands_that_look_answer_from_the_made_up_world() -> None:
    shown, _ = showing()
    guest, target = await idle(shown)
    plan = await shown.ask(["plan", guest.name, "--to", target], WIDTH)
    leaving = await shown.ask(["evacuate", guest.host, "--dry-run"], WIDTH)

    assert plan.text.startswith(f"in a simulation: {guest.name}: {guest.host} → {target}\n")
    assert f"{guest.name} → " in leaving.text
    assert (await shown.ask(["doctor"], WIDTH)).code == 0
    assert (await shown.ask(["plan", "nobody", "--to", target], WIDTH)).code == 2


@pytest.mark.parametrize(("hosts", "guests"), [(0, 0), (1, 3), (2, 4), (6, 6)])
async def test_small_fleets_and_an_empty_one_are_shown_too(hosts: int, guests: int) -> None:
    shown, clock = showing(hosts, guests)
    for _ in range(5):
        clock.now += 60.0
        await shown.jobs(10)

    fleet = await shown.fleet()
    assert len({one.name for one in fleet.guests}) == guests
    with pytest.raises(BadInput, match="no job"):
        await shown.job("m-none")
    await shown.close()


async def test_a_thousand_hosts_are_looked_at_in_no_time() -> None:
    shown, clock = showing(1000, 20_000, 50)
    await shown.jobs(50)
    took = []
    for _ in range(5):
        clock.now += 0.7
        began = time.process_time()
        await shown.jobs(50)
        await shown.fleet()
        took.append(time.process_time() - began)

    assert min(took) < 0.05
    fleet = await shown.fleet()
    assert await shown.fleet() is fleet
