"""Families of forks: what is started, listed, dropped and kept, and what is left of a snapshot."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.support.fork_agent import UUID, WEB1, XML, ForkAgents, fork_agents
from tests.support.stocking import Stock, stock
from vmckpt.app import controller as app_controller
from vmckpt.app import fleet, forks
from vmckpt.app.controller import Controller
from vmckpt.app.forks import RunRequest
from vmckpt.errors import (
    BadInput,
    Blocked,
    Cancelled,
    HostUnreachable,
    HypervisorError,
    KeyRefused,
    NotInStore,
    NotPermitted,
    RemoteError,
    VmckptError,
)
from vmckpt.journal import jobs, maintenance
from vmckpt.model.events import Caller
from vmckpt.model.guest import GuestState
from vmckpt.snapshot.fork_rules import ForkRequest, Keep, Ran
from vmckpt.snapshot.forks import Started
from vmckpt.store.format.metadata import Contents
from vmckpt.util import acting_user

__all__ = ["stock"]


@pytest.fixture
def agents(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> ForkAgents:
    return fork_agents(stock, monkeypatch)


class Acting:
    """The controller of a command, with its warnings."""

    def __init__(self) -> None:
        self.warned: list[str] = []
        caller = Caller(emit=lambda _: None, warn=self.warned.append, stop=asyncio.Event())
        known = app_controller.load_inventory()
        self.controller = Controller(inventory=known, caller=caller)

    async def start(self, source: str = "web1", **more: Any) -> Started:
        on = more.pop("on", None)
        request = ForkRequest(source=source, **more)
        return await forks.start(self.controller, None, request, on=on, identity=None)

    async def drop(self, *words: str, family: str | None = None) -> forks.Dropped:
        plan = await forks.doomed(self.controller.inventory, words, family)
        return await forks.drop(self.controller, plan)


def ids(stock: Stock) -> list[str]:
    return sorted(one.id for one in stock.store().manifests())


async def test_a_running_guest_is_captured_and_forked(agents: ForkAgents, stock: Stock) -> None:
    done = await Acting().start(count=3, folder="/srv/forks")
    assert [one.name for one in done.running] == ["web1-fork-1", "web1-fork-2", "web1-fork-3"]
    (order,) = agents.ordered
    assert ids(stock) == [done.snapshot] == [order.snapshot]
    assert (order.family, order.host, order.template) == (done.family, "alpha", "web1")
    assert [one.images["vda"] for one in order.children] == [
        f"/srv/forks/{name}-vda.qcow2" for name in agents.names()
    ]
    with jobs.open_journal() as journal:
        (job,) = journal.operations()
        (step,) = journal.steps(job.id)
    assert (job.kind, job.guest, job.source, job.outcome) == ("fork", "web1", "alpha", "completed")
    assert step.intent["guests"] == [one.uuid for one in done.forks]


async def test_a_snapshot_is_forked_on_another_host_beside_guests_of_these_names(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = fork_agents(stock, monkeypatch, WEB1, replace(WEB1, name="t-1", uuid="u-9"))
    id_ = stock.put("before", [1], domain_xml=XML, guest_uuid=UUID)
    done = await Acting().start("before", count=2, prefix="t", on="beta")
    assert (done.snapshot, done.host, agents.names("beta")) == (id_, "beta", ["t-2", "t-3"])
    assert ids(stock) == [id_]


@pytest.mark.parametrize(
    ("more", "kind", "why"),
    [
        ({"count": 0}, BadInput, "0 forks were requested"),
        ({"prefix": "a/b"}, BadInput, "cannot be the name of a guest"),
        ({"source": "nothing"}, NotInStore, "no host has a guest 'nothing', and "),
        ({"source": "disks"}, BadInput, "has no memory from which forks could continue"),
        ({"on": "gamma"}, BadInput, "gamma"),
        ({"on": "beta"}, Blocked, "beta: .*maintenance"),
    ],
)
async def test_what_cannot_be_forked_is_refused_before_anything_is_done(
    agents: ForkAgents, stock: Stock, more: dict[str, Any], kind: type[Exception], why: str
) -> None:
    there = stock.put("disks", [1], domain_xml=XML, guest_uuid=UUID, contents=Contents.DISKS)
    maintenance.enter("beta", "new memory")
    with pytest.raises(kind, match=why):
        await Acting().start(**more)
    assert (ids(stock), agents.ordered) == ([there], [])


async def test_a_guest_that_is_off_has_nothing_to_fork(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_agents(stock, monkeypatch, replace(WEB1, state=GuestState.SHUT_OFF))
    with pytest.raises(BadInput, match=r"so it has no memory .*; start the guest, or name one of"):
        await Acting().start()
    assert ids(stock) == []


async def test_a_guest_on_a_silent_host_is_not_called_unknown(
    agents: ForkAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: object) -> fleet.FoundGuests:
        return [], {"alpha": "no answer"}

    monkeypatch.setattr(fleet, "guests", silent)
    with pytest.raises(HostUnreachable, match="no answer from alpha"):
        await Acting().start()
    assert agents.ordered == []


async def test_without_a_key_no_snapshot_is_taken(agents: ForkAgents, stock: Stock) -> None:
    stock.encrypt()
    with pytest.raises(KeyRefused, match="nothing was done"):
        await Acting().start()
    assert (ids(stock), agents.ordered) == ([], [])


@pytest.mark.parametrize(
    ("command", "role", "allowed"),
    [("start", "view", False), ("start", "move", True), ("drop", "move", False),
     ("drop", "destroy", True), ("keep", "view", False), ("keep", "move", True)],
)  # fmt: skip
async def test_each_command_needs_its_role(
    agents: ForkAgents, monkeypatch: pytest.MonkeyPatch, command: str, role: str, allowed: bool
) -> None:
    await Acting().start(count=2, prefix="t")
    path = agents.stock.folder / "hosts.yaml"
    path.write_text(f"{path.read_text()}roles: {{{role}: {{users: [ann]}}}}\n")
    ann = replace(acting_user.acting_user(), name="ann", groups=frozenset(), root=False)
    monkeypatch.setattr(acting_user, "acting_user", lambda: ann)
    acting = Acting()
    work = {
        "start": acting.start, "drop": lambda: acting.drop("t-1"),
        "keep": lambda: forks.keep(acting.controller, "t-1"),
    }[command]  # fmt: skip
    if allowed:
        await work()  # type: ignore[operator]
        return
    with pytest.raises(
        NotPermitted, match=f"ann may not run vmckpt fork {command.replace('start', 'create')}"
    ):
        await work()  # type: ignore[operator]
    assert agents.names() == ["t-1", "t-2"]


@pytest.mark.parametrize(
    ("fails", "breaks", "kind", "left"),
    [
        ({"*": "no space"}, None, HypervisorError, 0),
        ({}, Cancelled("stopped"), Cancelled, 0),
        ({}, RemoteError("gone", host="alpha"), RemoteError, 1),  # forks may be running
    ],
)
async def test_the_snapshot_goes_if_no_fork_was_started(
    agents: ForkAgents, stock: Stock, fails: dict[str, str], breaks: VmckptError | None,
    kind: type[Exception], left: int,
) -> None:  # fmt: skip
    agents.fails, agents.breaks = fails, breaks
    with pytest.raises(kind):
        await Acting().start(count=2)
    assert len(ids(stock)) == left


async def test_forks_that_were_not_started_are_reported(agents: ForkAgents) -> None:
    agents.fails = {"web1-fork-2": "no space"}
    done = await Acting().start(count=3)
    assert [one.error for one in done.forks] == ["", "no space", ""]
    assert [one.name for one in done.running] == agents.names()


async def test_the_tree_has_each_family_once_and_names_silent_hosts(agents: ForkAgents) -> None:
    acting = Acting()
    first, second = await acting.start(count=2), await acting.start(on="beta")
    agents.families["alpha"] *= 2  # alpha has two names in the inventory, so to say
    found = await forks.tree(acting.controller.inventory)
    assert [(one.id, one.host, len(one.forks)) for one in found.families] == [
        (first.family, "alpha", 2), (second.family, "beta", 1),
    ]  # fmt: skip
    agents.silent = {"beta": "no route"}
    found = await forks.tree(acting.controller.inventory)
    assert [one.id for one in found.families] == [first.family]
    assert found.errors == {"beta": "no route"}


async def test_the_snapshot_goes_with_the_last_fork(agents: ForkAgents, stock: Stock) -> None:
    acting = Acting()
    started = await acting.start(count=3)
    done = await acting.drop("web1-fork-1", "web1-fork-3")
    assert (done.forks, done.snapshots, agents.names()) == (
        ("web1-fork-1", "web1-fork-3"), (), ["web1-fork-2"],
    )  # fmt: skip
    assert ids(stock) == [started.snapshot]
    done = await acting.drop(family=started.family)
    assert (done.forks, done.snapshots) == (("web1-fork-2",), (started.snapshot,))
    assert (ids(stock), acting.warned) == ([], [])


async def test_a_snapshot_of_the_operator_stays(agents: ForkAgents, stock: Stock) -> None:
    id_ = stock.put("before", [1], domain_xml=XML, guest_uuid=UUID)
    acting = Acting()
    started = await acting.start("before")
    assert (await acting.drop(family=started.family)).snapshots == ()
    assert (ids(stock), agents.names()) == ([id_], [])


async def test_a_snapshot_stays_while_it_is_pinned(
    agents: ForkAgents, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting = Acting()
    started = await acting.start()
    monkeypatch.setattr(forks, "_RELEASED_IN", 0.3)
    monkeypatch.setattr(agents, "lasts", True)
    assert (await acting.drop("web1-fork-1")).snapshots == ()
    assert f"run vmckpt snapshot delete {started.snapshot} --store near" in acting.warned[0]
    assert ids(stock) == [started.snapshot]


async def test_a_snapshot_stays_if_a_silent_host_may_use_it(
    agents: ForkAgents, stock: Stock
) -> None:
    acting = Acting()
    started = await acting.start()
    agents.silent = {"beta": "no route"}
    assert (await acting.drop("web1-fork-1")).snapshots == ()
    assert (ids(stock), agents.names()) == ([started.snapshot], [])
    assert "was not deleted; no answer from beta: no route" in acting.warned[0]


@pytest.mark.parametrize("words", [["web1"], ["web1-fork-1", "other"], []])
async def test_only_forks_are_dropped(agents: ForkAgents, words: list[str]) -> None:
    acting = Acting()
    await acting.start()
    with pytest.raises(BadInput, match=r"is not a fork of a family|no fork is named"):
        await acting.drop(*words)
    assert agents.names() == ["web1-fork-1"]


async def test_a_host_that_fails_does_not_spare_the_forks_of_others(agents: ForkAgents) -> None:
    acting = Acting()
    await acting.start(prefix="a")
    await acting.start(prefix="b", on="beta")
    plan = await forks.doomed(acting.controller.inventory, ["a-1", "b-1"], None)
    agents.silent = {"alpha": "no route"}
    with pytest.raises(RemoteError, match="no route"):
        await forks.drop(acting.controller, plan)
    assert (agents.names("alpha"), agents.names("beta")) == (["a-1"], [])


async def test_a_kept_fork_leaves_its_family(agents: ForkAgents, stock: Stock) -> None:
    acting = Acting()
    started = await acting.start(count=2)
    first, second = started.forks
    done = await forks.keep(acting.controller, first.name)
    assert (done.fork.uuid, done.unused, agents.kept) == (first.uuid, None, [first.uuid])
    done = await forks.keep(acting.controller, second.uuid)
    assert (done.unused, ids(stock)) == (started.snapshot, [started.snapshot])
    with pytest.raises(BadInput, match="web1-fork-1 is not a fork of a family"):
        await forks.keep(acting.controller, first.name)


def order(command: str, keep: Keep = Keep.BEST) -> RunRequest:
    return RunRequest(command=command, parallel=4, keep=keep)


async def test_the_best_stays_and_the_others_are_dropped(agents: ForkAgents) -> None:
    acting, told = Acting(), list[Ran]()
    started = await acting.start(count=4)
    command = "n={}; test $n = $VMCKPT_GUEST && echo ${n##*-} && test $n != web1-fork-4"
    done = await forks.run(acting.controller, started, order(command), told.append)
    assert (done.best, done.kept, agents.names()) == (
        "web1-fork-3", ("web1-fork-3",), ["web1-fork-3"],
    )  # fmt: skip
    assert done.dropped == ("web1-fork-1", "web1-fork-2", "web1-fork-4")
    assert tuple(told) == done.ran


async def test_all_stay_if_asked(agents: ForkAgents) -> None:
    acting = Acting()
    started = await acting.start(count=2)
    done = await forks.run(acting.controller, started, order("false", Keep.ALL), lambda _: None)
    assert (done.best, done.dropped, agents.names()) == (None, (), ["web1-fork-1", "web1-fork-2"])


async def test_nothing_stays_if_no_command_succeeds(agents: ForkAgents, stock: Stock) -> None:
    acting = Acting()
    started = await acting.start(count=2)
    done = await forks.run(acting.controller, started, order("false"), lambda _: None)
    assert (done.best, done.kept, agents.names(), ids(stock)) == (None, (), [], [])


async def test_stopping_drops_all_forks(agents: ForkAgents, stock: Stock) -> None:
    acting = Acting()
    started = await acting.start(count=2)
    asyncio.get_running_loop().call_later(0.2, acting.controller.caller.stop.set)
    with pytest.raises(Cancelled, match="the commands were ended, and 2 forks were dropped"):
        await forks.run(acting.controller, started, order("sleep 600"), lambda _: None)
    assert (agents.names(), ids(stock)) == ([], [])


async def test_forks_that_could_not_be_dropped_are_named(agents: ForkAgents) -> None:
    acting = Acting()
    started = await acting.start(count=2)
    agents.silent = {"alpha": "no route"}
    with pytest.raises(RemoteError):
        await forks.run(acting.controller, started, order("false"), lambda _: None)
    assert f"run vmckpt fork drop --family {started.family}" in acting.warned[-1]
