"""What a guest lacks, what is written into its definition, and what recovery says of it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest

from tests.support.builders import GUEST, HOST, PROBE
from vmckpt.capture.network_cards import CardReport, CardState
from vmckpt.errors import BadInput, GuestLocked, HypervisorError, RemoteError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.domains import Definition
from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import OrphanedJob
from vmckpt.journal.store import Journal
from vmckpt.model.events import Caller
from vmckpt.model.finding import Severity
from vmckpt.model.guest import Guest, GuestJob, GuestState
from vmckpt.model.host import HostProbe
from vmckpt.model.migration import Outcome
from vmckpt.remote import probe
from vmckpt.snapshot import live_cards, prepare
from vmckpt.snapshot.live_cards import LiveCards
from vmckpt.snapshot.prepare import Readiness
from vmckpt.snapshot.request import Step
from vmckpt.units import Seconds

BARE = "<domain type='kvm'><name>web1</name><uuid>0d3f</uuid><devices/></domain>"


def caller() -> Caller:
    return Caller(emit=lambda _: None, warn=print, stop=asyncio.Event())


READY = """<domain type='kvm'><name>web1</name><uuid>0d3f</uuid><genid>77ff</genid>
  <memoryBacking><source type='file'/><access mode='shared'/></memoryBacking><devices/></domain>"""
CARD = CardReport(card="net0", mac="52:54:00:00:00:01", why="net0 uses vhost")
DONE = replace(CARD, replaced=True, gone=Seconds(0.5))


class Libvirt:
    """A host's: what it has stored of a guest, and what runs."""

    def __init__(self) -> None:
        self.guest: Guest | None = GUEST
        self.stored = BARE
        self.running: str | None = None
        self.written: list[str] = []

    async def find_guest(self, *_: object) -> Guest | None:
        return self.guest

    async def stored_definition(self, *_: object) -> Definition:
        live = None if self.running is None else ET.fromstring(self.running)
        return Definition(text=self.stored, running=live, disks=())

    async def write(self, _: object, __: str, xml: str, *, instead_of: str) -> None:
        assert instead_of == self.stored
        self.stored = xml
        self.written.append(xml)


class Agent:
    """A host's, as far as cards are concerned."""

    def __init__(self) -> None:
        self.seen = LiveCards(cards=(CARD,))
        self.state = CardState.NOTHING
        self.fails: Exception | None = None
        self.orders: list[str] = []

    async def look(self, *_: object) -> LiveCards:
        self.orders.append("look")
        return self.seen

    async def replace(self, *_: object) -> LiveCards:
        self.orders.append("replace")
        if self.fails is not None:
            raise self.fails
        return LiveCards(cards=(DONE,))

    async def finish(self, *_: object, dry: bool) -> CardState:
        self.orders.append("finish dry" if dry else "finish")
        return self.state


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent()
    for name in ("look", "replace", "finish"):
        monkeypatch.setattr(live_cards, name, getattr(made, name))
    return made


@pytest.fixture
def libvirt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Libvirt:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    made = Libvirt()
    for name in ("find_guest", "stored_definition", "write"):
        monkeypatch.setattr(domains, name, getattr(made, name))

    async def unknown(_: object) -> bool:
        return False

    monkeypatch.setattr(prepare, "_finds_writes", unknown)
    return made


async def test_to_look_changes_nothing(libvirt: Libvirt) -> None:
    found = await prepare.readiness(HOST, "web1", caller())

    assert (found.lacks, found.changed, found.ready) == (True, False, False)
    assert libvirt.written == []


async def test_what_it_lacks_is_written_once_and_kept_in_the_journal(libvirt: Libvirt) -> None:
    first = await prepare.make_ready(HOST, "web1", caller())
    second = await prepare.make_ready(HOST, "web1", caller())

    assert (first.changed, first.ready, first.restart) == (True, True, False)
    assert (second.lacks, second.changed, second.ready) == (False, False, True)
    assert len(libvirt.written) == 1
    with Journal() as journal:
        jobs = {one.id: one for one in journal.operations(active=False)}
    assert jobs[first.job or ""].outcome == jobs[second.job or ""].outcome == "completed"


async def test_a_guest_that_runs_stays_as_it_is_until_it_is_started_anew(libvirt: Libvirt) -> None:
    libvirt.running = BARE
    found = await prepare.make_ready(HOST, "web1", caller())

    assert (found.changed, found.restart, found.ready) == (True, True, False)


async def test_a_guest_that_is_away_or_busy_is_not_touched(libvirt: Libvirt) -> None:
    libvirt.guest = replace(GUEST, job=GuestJob.OUTGOING)
    with pytest.raises(GuestLocked, match="nothing was changed"):
        await prepare.make_ready(HOST, "web1", caller())
    libvirt.guest = None
    with pytest.raises(BadInput, match="alpha has no guest web1"):
        await prepare.make_ready(HOST, "web1", caller())

    assert libvirt.written == []


def jobs() -> list[Any]:
    with Journal() as journal:
        return list(journal.operations())


async def test_cards_are_looked_at_only_when_they_are_asked_for(
    libvirt: Libvirt, agent: Agent
) -> None:
    libvirt.stored = libvirt.running = READY
    assert (await prepare.readiness(HOST, "web1", caller())).as_json()["cards"] is None
    assert agent.orders == []
    found = await prepare.readiness(HOST, "web1", caller(), live=True)

    assert (found.to_do, found.live) == (True, agent.seen)
    assert [one["card"] for one in found.as_json()["cards"]] == ["net0"]
    assert jobs() == []


async def test_cards_are_replaced_after_the_definition_was_changed(
    libvirt: Libvirt, agent: Agent
) -> None:
    libvirt.running = READY
    found = await prepare.make_ready(HOST, "web1", caller(), live=True)

    assert agent.orders == ["look", "replace"]
    assert len(libvirt.written) == 1
    assert (found.changed, found.ready, found.to_do) == (True, True, False)
    (job,) = jobs()
    assert job.outcome == "completed"
    with Journal() as journal:
        (step,) = journal.steps(job.id)
    assert (step.name, step.intent) == (Step.CARDS, {"cards": [CARD.mac]})


async def test_without_cards_to_replace_no_step_is_taken(libvirt: Libvirt, agent: Agent) -> None:
    libvirt.stored = libvirt.running = READY
    agent.seen = LiveCards(cards=(), refused="the guest is paused")
    found = await prepare.make_ready(HOST, "web1", caller(), live=True)

    assert (agent.orders, found.to_do) == (["look"], False)


async def test_cards_that_cannot_be_replaced_leave_everything_as_it_is(
    libvirt: Libvirt, agent: Agent
) -> None:
    libvirt.running = BARE
    agent.seen = replace(agent.seen, refused="net0 is connected to br9")
    with pytest.raises(BadInput, match=r"connected to br9; nothing was changed"):
        await prepare.make_ready(HOST, "web1", caller(), live=True)
    assert (agent.orders, libvirt.written) == (["look"], [])


async def test_a_guest_that_is_off_has_no_cards_to_replace(libvirt: Libvirt, agent: Agent) -> None:
    libvirt.guest = replace(GUEST, state=GuestState.SHUT_OFF)
    for call in (prepare.readiness, prepare.make_ready):
        with pytest.raises(BadInput, match="web1 is shut off on alpha"):
            await call(HOST, "web1", caller(), live=True)
    assert agent.orders == []


@pytest.mark.parametrize("undone", [True, False])
async def test_a_job_stays_open_while_a_card_may_be_unplugged(
    libvirt: Libvirt, agent: Agent, undone: bool
) -> None:
    libvirt.stored = libvirt.running = READY
    agent.fails = HypervisorError("alpha: network card net0 of web1 was unplugged", host="alpha")
    agent.fails.undone = undone
    with pytest.raises(HypervisorError, match="was unplugged"):
        await prepare.make_ready(HOST, "web1", caller(), live=True)
    (job,) = jobs()
    assert job.outcome == ("failed" if undone else None)


async def test_recovery_finishes_an_interrupted_replacement(libvirt: Libvirt, agent: Agent) -> None:
    libvirt.stored = libvirt.running = READY
    agent.fails, agent.state = RemoteError("alpha: the agent is gone"), CardState.ABSENT
    with pytest.raises(RemoteError):
        await prepare.make_ready(HOST, "web1", caller(), live=True)
    (job,) = jobs()
    assert job.active
    with Journal() as journal:
        steps = journal.steps(job.id)
    known = Inventory(path=Path("hosts.yaml"), hosts={"alpha": HOST}, observer=None)
    case = OrphanedJob(
        inventory=known, operation=job, steps=steps, recorder=None, caller=caller(), adopt=False
    )
    told = await prepare.settle(case, ())
    assert (told.outcome, told.did) == (Outcome.COMPLETED, ("plug the network card in again",))
    assert agent.orders[2:] == ["finish dry"]
    recorder = cast("Any", type("Recorder", (), {"finish": lambda *_: None})())
    agent.state = CardState.OLD
    told = await prepare.settle(replace(case, recorder=recorder), ())
    assert told.outcome is None
    assert agent.orders[3:] == ["finish"]


@pytest.mark.parametrize("state", [CardState.NEW, CardState.NOTHING, CardState.ABSENT])
async def test_a_replacement_has_failed_while_the_guest_needs_it(
    libvirt: Libvirt, agent: Agent, state: CardState
) -> None:
    card = "<interface type='bridge'><model type='virtio'/></interface>"
    libvirt.stored, agent.state = READY, state
    libvirt.running = READY.replace("<devices/>", f"<devices>{card}</devices>")
    operation: Any = type("Operation", (), {"source": "alpha", "guest_uuid": "u", "guest": "web1"})
    step: Any = type("Step", (), {"name": Step.CARDS})
    case = OrphanedJob(
        inventory=Inventory(path=Path("hosts.yaml"), hosts={"alpha": HOST}, observer=None),
        operation=operation, steps=(step,), recorder=None, caller=caller(), adopt=False,
    )  # fmt: skip
    assert (await prepare.settle(case, ())).outcome is Outcome.FAILED


async def test_memory_is_not_shared_on_a_host_that_finds_written_pages(
    libvirt: Libvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def known(_: object) -> bool:
        return True

    monkeypatch.setattr(prepare, "_finds_writes", known)
    found = await prepare.make_ready(HOST, "web1", caller())
    assert found.changed
    assert "memoryBacking" not in libvirt.stored
    assert Severity.OK in [one.severity for one in found.findings if one.code == "memory"]


async def test_what_a_host_finds_is_asked_over_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    class Over:
        def __init__(self, _: object) -> None:
            pass

        async def __aenter__(self) -> "Over":
            return self

        async def __aexit__(self, *_: object) -> None:
            return

    async def probed(*_: object) -> HostProbe:
        if answer is None:
            raise RemoteError("alpha: no answer")
        return answer

    monkeypatch.setattr(prepare, "Remote", Over)
    monkeypatch.setattr(probe, "probe_host", probed)
    answer: HostProbe | None = replace(PROBE, kernel=(6, 12))
    assert HOST.ssh is not None
    assert await prepare._finds_writes(HOST)
    answer = replace(PROBE, kernel=(5, 10))
    assert not await prepare._finds_writes(HOST)
    answer = None
    assert not await prepare._finds_writes(HOST)
    assert not await prepare._finds_writes(replace(HOST, ssh=None))


@pytest.mark.parametrize("written", [False, True])
async def test_recovery_tells_which_definition_is_there(libvirt: Libvirt, written: bool) -> None:
    if written:
        await prepare.make_ready(HOST, "web1", caller())
    operation: Any = type("Operation", (), {"source": "alpha", "guest_uuid": "u", "guest": "web1"})
    known = Inventory(path=Path("hosts.yaml"), hosts={"alpha": HOST}, observer=None)
    case = OrphanedJob(
        inventory=known, operation=operation, steps=(), recorder=None, caller=caller(), adopt=False
    )
    told = await prepare.settle(case, ())

    assert told.outcome is (Outcome.COMPLETED if written else Outcome.FAILED)


@pytest.mark.parametrize(
    ("lacks", "restart", "changed", "ready"),
    [
        (False, False, False, True), (True, False, False, False), (True, False, True, True),
        (False, True, False, False), (True, True, True, False),
    ],
)  # fmt: skip
def test_a_guest_is_ready_if_it_is_as_it_should_be(
    lacks: bool, restart: bool, changed: bool, ready: bool
) -> None:
    made = Readiness(
        guest="web1", host="alpha", findings=(), lacks=lacks, restart=restart, changed=changed
    )

    assert made.ready is ready
    assert made.as_json()["ready"] is ready
