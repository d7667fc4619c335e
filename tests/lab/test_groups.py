"""Several guests as one cut: nothing was received that was not sent, and nobody stays behind."""

import asyncio
import logging
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.lab import chatting
from tests.lab.bench import Bench, until
from tests.lab.chatting import GROUP, PLACES, Archive, free, held
from tests.lab.snapshots import ids, left
from vmckpt.errors import Cancelled, CannotCapture, RemoteError
from vmckpt.model.recovery import Phase
from vmckpt.snapshot.request import Taken
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.repository import Store
from vmckpt_lab import guest_chat, guests, lab, network
from vmckpt_lab.faults import inject
from vmckpt_lab.machine_speed import slowness
from vmckpt_lab.observer import client

log = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def talking(session_lab: Bench) -> Iterator[Bench]:
    """Three guests that chat, and a store; after a blow they are as before, or a test fails."""
    bench = session_lab
    bench.good("snapshot", "init")
    chatting.started(bench)
    yield bench
    for name in PLACES:
        guests.remove(bench.plan, name)
    bench.inside("alpha", "rm", "-rf", str(bench.plan.shared / "snapshots"))
    for one in bench.plan.hosts:
        bench.inside(one.name, "rm", "-rf", str(one.root / "agent"))


@pytest.fixture(autouse=True)
def settled(talking: Bench) -> None:
    """One that failed leaves nothing to the next."""
    talking.good("recover")
    emptied(talking)


def emptied(bench: Bench) -> None:
    """Delete all snapshots."""
    if found := ids(bench):
        bench.good("snapshot", "delete", *found, "--yes")


def cut(bench: Bench) -> dict[str, Any]:
    return dict(bench.good("snapshot", "create", "--group", GROUP, "--json").json)


def consistent(archive: Archive, made: Sequence[str], *, whole: bool = True) -> None:
    """Hold a cut (ids) against itself.

    `whole`: and see that what was held before came out, all of it. A guest that stood still for
    seconds has lost what others sent to it meanwhile, as it would without us.
    """
    chats = archive.chats(made)
    assert len(chats) == len(PLACES)
    assert guest_chat.violations(chats) == []
    if whole:
        assert lost(chats) == 0


def lost(chats: Sequence[guest_chat.Chat]) -> int:
    """Return how many messages never came, since the guests began to chat."""
    return sum(peer.lost for one in chats for peer in one.peers.values())


def one_after_the_other(bench: Bench, archive: Archive) -> list[str]:
    """What the same check finds in three snapshots that are no cut."""
    taken = [bench.good("snapshot", "create", guest, "--json").json["id"] for guest in PLACES]
    return guest_chat.violations(archive.chats(taken))


@pytest.mark.campaign
def test_what_was_received_was_sent(talking: Bench) -> None:
    archive = Archive(talking)
    cuts = [cut(talking) for _ in range(3)]
    for made in cuts:
        consistent(archive, [one["id"] for one in made["members"]])
    rows = talking.good("snapshot", "list", "--json").json
    assert rows[-1]["group"] == {"id": cuts[-1]["group"], "there": 3, "of": 3}
    talking.good("snapshot", "delete", rows[-1]["id"], "--yes")
    words = talking.good("snapshot", "list").out.split()
    assert "is incomplete: 2 of 3" in " ".join(word for word in words if word not in "│┃")
    assert one_after_the_other(talking, archive) != []
    emptied(talking)
    let_go(talking)


@pytest.mark.long
def test_a_group_comes_back_as_one(talking: Bench) -> None:
    archive = Archive(talking)
    made = cut(talking)
    refused = talking.run("snapshot", "restore", made["group"])
    assert (refused.code, "nothing was changed" in refused.err) == (18, True)
    done = talking.good("snapshot", "restore", made["group"], "--replace", "--json").json
    assert {one["guest"]: one["host"] for one in done["members"]} == PLACES
    until(lambda: free(talking), limit=30.0)
    # What was sent after the cut by those that were ended, nobody who came back has received.
    consistent(archive, [one["id"] for one in cut(talking)["members"]], whole=False)
    emptied(talking)
    let_go(talking)
    # They went back in time and tell again what they had told: for later tests that is the past.
    for one in guests.stored(talking.plan):
        client.ask(talking.plan.observer_socket, op="watch", guest=one.name, address=one.address)


def nothing(_: str, __: Phase) -> None:
    """Happens."""


@pytest.mark.parametrize(
    "times",
    [pytest.param(3, marks=pytest.mark.long), pytest.param(50, marks=pytest.mark.campaign)],
)
def test_many_cuts(talking: Bench, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    archive = Archive(talking)
    store = Store.open(backend_of(str(talking.plan.shared / "snapshots")))
    told: list[Taken] = []
    losses = [0]
    for _ in range(times):
        made = chatting.taken(talking, monkeypatch, nothing, asyncio.Event()).members
        consistent(archive, [one.id for one in made], whole=False)
        losses.append(lost(archive.chats([one.id for one in made])))
        told += made
        for one in made:
            log.info("%s %s: pause %.4f s, held %.4f s", one.group, one.guest, one.pause, one.held)
            store.delete(one.id)
    assert all(one_after_the_other(talking, archive) for _ in range(3))
    # A guest that stands still for a second on a busy machine overruns its own receive queue; a
    # cut that drops what it holds does it every time.
    spotless = [before == after for before, after in pairwise(losses)]
    assert sum(spotless) > times / 2, losses
    held_ = [one.held or 0.0 for one in told]
    # Where nothing else runs it is a hundredth of that.
    assert statistics.median(held_) < 2.0 * slowness()
    emptied(talking)
    for guest in PLACES:
        assert talking.ledgers(guest) == {"memory": True, "disk": True, "output": True}


def let_go(bench: Bench) -> None:
    """All run, nothing is held and nothing left."""
    until(lambda: free(bench), limit=30.0)
    assert (ids(bench), left(bench)) == ([], [])


def struck(bench: Bench) -> None:
    """After whatever happened: once it is recovered, cuts are as good as ever."""
    bench.good("recover")
    let_go(bench)
    made = cut(bench)
    consistent(Archive(bench), [one["id"] for one in made["members"]], whole=False)
    emptied(bench)


@pytest.mark.long
def test_ctrl_c_in_each_phase(talking: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for phase in Phase:
        stop = asyncio.Event()

        def blow(_: str, at: Phase, mine: Phase = phase, stop: asyncio.Event = stop) -> None:
            # With the first one that is there: once the last one is, in the last phase, all is
            # stored, and it is too late to stop it.
            if at is mine:
                stop.set()

        with pytest.raises(Cancelled):
            chatting.taken(talking, monkeypatch, blow, stop)
        let_go(talking)
    struck(talking)


@pytest.mark.long
@pytest.mark.parametrize("phase", [Phase.STOPPED, Phase.CAPTURED])
def test_an_agent_that_dies_takes_nobody_along(
    talking: Bench, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    def blow(member: str, at: Phase) -> None:
        if (member, at) == ("web2 on beta", phase):
            assert held(talking, "web2") != []
            os.kill(chatting.agent_of(talking, "web2"), signal.SIGKILL)

    with pytest.raises(RemoteError, match="the outcome for web2 on beta is unknown"):
        chatting.taken(talking, monkeypatch, blow, asyncio.Event())
    struck(talking)


@pytest.mark.campaign
def test_an_agent_that_hangs_is_late(talking: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    agents: list[int] = []

    def blow(member: str, at: Phase) -> None:
        if (member, at) == ("web2 on beta", Phase.STOPPED):
            agents.append(chatting.agent_of(talking, "web2"))
            os.kill(agents[0], signal.SIGSTOP)

    try:
        with pytest.raises(RemoteError, match="not captured within 5 s: web2 on beta"):
            chatting.taken(talking, monkeypatch, blow, asyncio.Event())
        assert free(talking)
    finally:
        os.kill(agents[0], signal.SIGCONT)
    struck(talking)


@pytest.mark.long
def test_a_host_that_is_cut_off_lets_its_guest_go(
    talking: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blow(member: str, at: Phase) -> None:
        if (member, at) == ("web2 on beta", Phase.STOPPED):
            network.cut(talking.plan, "beta")

    with pytest.raises(RemoteError, match="not captured within 5 s: web2 on beta"):
        chatting.taken(talking, monkeypatch, blow, asyncio.Event())
    assert free(talking)  # asked inside the host
    lab.heal(talking.plan, "beta")
    struck(talking)


_KILLED = """
import asyncio, os, signal, sys
from tests.lab import chatting
from tests.lab.bench import Bench
from vmckpt_lab import lab
from vmckpt.model.recovery import Phase
import pytest
def blow(member, at):
    if (member, at) == ("web2 on beta", Phase(sys.argv[2])):
        os.kill(os.getpid(), signal.SIGKILL)
chatting.taken(Bench(lab.load(sys.argv[1])), pytest.MonkeyPatch(), blow, asyncio.Event())
"""


@pytest.mark.long
def test_a_killed_controller_is_recovered(talking: Bench) -> None:
    for phase in Phase:
        words = [sys.executable, "-c", _KILLED, talking.plan.name, str(phase)]
        done = subprocess.run(words, env=talking.environment, check=False, capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        told = talking.good("recover", "--json").json
        assert [one["outcome"] for one in told] == ["failed"] * 3
        let_go(talking)
    struck(talking)


@pytest.mark.campaign
def test_the_last_watchdog_is_qemu_itself(talking: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent and keepers are killed at once: output comes out, and recover takes the filter away."""

    def blow(member: str, at: Phase) -> None:
        if (member, at) == ("web2 on beta", Phase.CAPTURED):
            agent = chatting.agent_of(talking, "web2")
            keepers = subprocess.run(
                ["pgrep", "-P", str(agent)], capture_output=True, text=True, check=True
            ).stdout.split()
            for process in (agent, *map(int, keepers)):
                os.kill(process, signal.SIGSTOP)
            for process in (agent, *map(int, keepers)):
                inject.kill(process)

    with pytest.raises(RemoteError, match="web2"):
        chatting.taken(talking, monkeypatch, blow, asyncio.Event())
    assert held(talking, "web2") != []
    heard = talking.seen("web2").heard
    until(lambda: talking.seen("web2").heard > heard, limit=20.0)
    struck(talking)


@pytest.mark.campaign
def test_a_card_that_cannot_be_held_is_refused(
    talking: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = guests.domain_xml

    def queued(*args: object) -> str:
        xml = usual(*args)  # type: ignore[arg-type]
        return xml.replace("<driver name='qemu'/></interface>",
                           "<driver name='qemu' queues='2'/></interface>")  # fmt: skip

    with monkeypatch.context() as patch:
        patch.setattr(guests, "domain_xml", queued)
        talking.guest("mq1", "beta", **{**chatting.SMALL, "vcpus": 2})
    try:
        done = talking.run("snapshot", "create", "--group", f"{GROUP},mq1")
    finally:
        guests.remove(talking.plan, "mq1")
    assert done.code == CannotCapture.exit_code, done.err
    assert "mq1 on beta: the guest's output cannot be buffered: net0 has 2 queues" in done.err
    struck(talking)
