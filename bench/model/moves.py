"""Determine everything that may happen next in a world: steps of processes, time and faults."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

from bench.model import alpha, beta, effects, store
from bench.model.effects import Blocked
from bench.model.replay import NONE, NOW, Done, Effect, Replayer, Task, time_of
from bench.model.world import (
    DEAD,
    GONE,
    PAUSED,
    RUNS,
    TERMS,
    WAITS,
    Alpha,
    World,
    aged,
    heard,
    older,
)  # fmt: skip
from vmckpt.replication.watchdog import rules

_RULES = rules.Rules()
_PAUSED = NOW - 10.0
Move = tuple[str, World]


class Moves:
    """The successors of a world. Use inside `alpha.on_fakes()` and `beta.on_fakes()`."""

    def __init__(self) -> None:
        self._alpha = Replayer(alpha.ENTRIES)
        self._beta = Replayer(beta.ENTRIES)

    def __call__(self, world: World) -> Iterator[Move]:
        """Yield each successor with a description. Raises effects.Violation."""
        yield from self._main(world)
        yield from self._keep(world)
        yield from self._order(world)
        yield from self._backup(world)
        yield from _watchdog(world)
        yield from _time(world)
        yield from _faults(world)
        yield from _controller(world)

    # -- processes ---------------------------------------------------------------------------------

    def _step(
        self, world: World, process: str, task: Task
    ) -> Iterator[tuple[str, World, Task | Done]]:
        """Run a process until its next visible effect. Yields the outcomes of the effect."""
        world, then = self._settled(world, process, task)
        if isinstance(then, Done):
            yield f"{process}: {task.entry} ends", world, then
            return
        effect = self._of(process).run(then)
        assert isinstance(effect, Effect)
        with suppress(Blocked):
            for label, new, answer in effects.outcomes(world, process, effect):
                yield label, *self._settled(new, process, then.told(*answer))

    def _of(self, process: str) -> Replayer:
        return self._beta if process == "beta" else self._alpha

    def _settled(self, world: World, process: str, task: Task) -> tuple[World, Task | Done]:
        """Run a process until before its next effect that other processes can see."""
        while True:
            found = self._of(process).run(task)
            if isinstance(found, Done):
                return world, found
            known = effects.local(world, process, found)
            if known is None:
                return world, task
            world, answer = known
            task = task.told(*answer)

    def _main(self, world: World) -> Iterator[Move]:
        agent = world.alpha.agent
        if agent is None:
            return
        task = agent.main or Task(agent.at, (agent.life, agent.fields), ())
        for label, new, then in self._step(world, "main", task):
            now = new.alpha.agent
            if now is None:
                yield label, new
            elif isinstance(then, Task):
                yield label, _agent(new, main=then)
            elif then.error is not None:
                yield label, self._returned(new, task, then)
            else:
                at, fields = then.result
                yield (
                    label,
                    _agent_gone(new)
                    if at == "over"
                    else _agent(new, main=None, at=at, fields=fields),
                )

    @staticmethod
    def _returned(world: World, task: Task, then: Done) -> World:
        """Handle an error: the agent waits, or it dies, and its watchdog starts another agent."""
        if then.error == "Again":
            return _agent(world, main=None)
        return _agent_gone(world)

    def _keep(self, world: World) -> Iterator[Move]:
        agent = world.alpha.agent
        if agent is None or agent.at in ("enter",) or agent.lost or world.alpha.guest == DEAD:
            return
        if agent.keep is None and agent.renewed == 0:
            return  # a second renewal in the same tick has no effect
        task = agent.keep or Task("keep", (agent.life, ()), ())
        for label, new, then in self._step(world, "keep", task):
            if new.alpha.agent is not None:
                yield label, _agent(new, keep=then if isinstance(then, Task) else None)

    def _order(self, world: World) -> Iterator[Move]:
        task = world.alpha.order
        if task is None:
            return
        for label, new, then in self._step(world, "order", task):
            order = then if isinstance(then, Task) else None
            yield label, new._replace(alpha=new.alpha._replace(order=order))

    def _backup(self, world: World) -> Iterator[Move]:
        held = world.beta
        if not held.agent or held.guest != WAITS:
            return
        for task, taken in _tasks_of_beta(world):
            for label, new, then in self._step(taken, "beta", task):
                yield label, _backup_went_on(new, then)


def _tasks_of_beta(world: World) -> Iterator[tuple[Task, World]]:
    held, link = world.beta, world.link
    if held.task is not None:
        yield held.task, world
        return
    if held.ours:
        yield Task("run", (held.handed, ()), ()), world
        return
    if link.up:
        rest = world._replace(link=link._replace(up=link.up[1:]))
        yield Task("message", (held.handed, link.up[0]), ()), rest
    yield Task("poll", (held.handed, ()), ()), world


def _backup_went_on(world: World, then: Task | Done) -> World:
    if isinstance(then, Task):
        return world._replace(beta=world.beta._replace(task=then))
    new = world.beta._replace(task=None)
    if then.error is None:
        what, handed = then.result
        new = new._replace(handed=handed, ours=new.ours or what == "ours")
        if what == "cut":
            world = world._replace(link=world.link._replace(open=False, up=()))
        if what == "over":
            new = new._replace(guest=GONE, agent=False)
            world = world._replace(link=world.link._replace(up=()))
    return world._replace(beta=new)


def _agent(world: World, **changes: Any) -> World:
    agent = world.alpha.agent
    assert agent is not None
    return world._replace(alpha=world.alpha._replace(agent=agent._replace(**changes)))


def _agent_gone(world: World) -> World:
    gone = world._replace(alpha=world.alpha._replace(agent=None))
    return gone._replace(link=effects.hung_up(world))


def _watchdog(world: World) -> Iterator[Move]:
    held = world.alpha
    if not held.watchdog:
        return
    seen = rules.WatchdogFacts(
        guest_lives=held.guest != DEAD, over="over" in held.files or held.shut,
        gone=NOW if held.guest == DEAD else 0.0, renewed=time_of(held.page), lasts=TERMS.lasts,
        stopped=_PAUSED if _paused_by_an_agent(held) else 0.0,
        agent_lives=held.agent is not None, agent_since=NOW, came=NOW, spoke=0.0, started=None,
        woke=NOW, resumable=True, resuming=False, resumed=None,
    )  # fmt: skip
    match rules.decide(seen, NOW, _RULES):
        case rules.KillGuest(_):
            yield (
                "watchdog: kills the guest",
                world._replace(alpha=held._replace(guest=DEAD, timer=None)),
            )
        case rules.ResumeGuest():
            yield "watchdog: resumes the guest", effects.runs_on_alpha(world)
        case rules.StartAgent() if held.guest != DEAD:
            yield "watchdog: starts an agent", effects.agent_begins(world)
        case rules.End(_):
            yield "watchdog: ends", world._replace(alpha=held._replace(watchdog=False))
        case _:
            pass  # it waits


def _paused_by_an_agent(held: Alpha) -> bool:
    """Return whether a dead agent left the guest paused for an epoch, not for a switchover."""
    return held.guest == PAUSED and held.agent is None and "switching" not in held.files


# -- time and faults -------------------------------------------------------------------------------


def _time(world: World) -> Iterator[Move]:
    yield "a tick", _tick(world)
    if world.budget.drifts:
        less = world._replace(budget=world.budget._replace(drifts=world.budget.drifts - 1))
        yield "a tick that alpha's clock misses", _tick(less, alpha_too=False)


def _tick(world: World, *, alpha_too: bool = True) -> World:
    held, lease = world.alpha, world.lease
    if alpha_too:
        timer = None if held.timer is None else held.timer - 1
        dead = timer is not None and timer <= 0
        agent = held.agent
        if agent is not None:
            agent = agent._replace(
                renewed=older(agent.renewed), main=aged(agent.main), keep=aged(agent.keep)
            )
        held = held._replace(
            timer=None if dead else timer, guest=DEAD if dead else held.guest, agent=agent,
            page=older(held.page), order=aged(held.order),
        )  # fmt: skip
    backup = world.beta._replace(
        since=older(world.beta.since) if world.beta.seen else 0, task=aged(world.beta.task)
    )
    return world._replace(alpha=held, beta=backup, lease=lease._replace(age=older(lease.age)))


def _faults(world: World) -> Iterator[Move]:
    yield from _kills(world)
    yield from _crashes(world)
    yield from _promotions(world)
    yield from _of_the_link(world)
    yield from _by_others(world)
    for number, (call, args) in enumerate(world.late):
        rest = world._replace(late=world.late[:number] + world.late[number + 1 :])
        new, told = effects.asked(rest, call, args)
        yield f"store: a late {call} arrives: {told['said']}", new


def _kills(world: World) -> Iterator[Move]:
    held, budget = world.alpha, world.budget
    if budget.agents and held.agent is not None:
        less = world._replace(budget=budget._replace(agents=budget.agents - 1))
        yield "fault: alpha's agent is killed", _agent_gone(less)
    if budget.watchdogs and held.watchdog:
        less = world._replace(budget=budget._replace(watchdogs=budget.watchdogs - 1))
        yield "fault: the watchdog is killed", less._replace(alpha=held._replace(watchdog=False))
    if budget.backups and world.beta.agent and world.beta.guest == WAITS:
        less = world._replace(budget=budget._replace(backups=budget.backups - 1))
        yield "fault: beta's agent is killed", _backup_restarts(less)


def _crashes(world: World) -> Iterator[Move]:
    budget, link = world.budget, world.link
    if not budget.crashes:
        return
    less = world._replace(budget=budget._replace(crashes=budget.crashes - 1))
    for kept in range(len(link.up) + 1):
        label = f"fault: alpha loses power, {kept} messages arrive"
        yield label, _power_off(less._replace(link=link._replace(up=link.up[:kept])))
    crashed = less._replace(lease=store.crashed(world.lease))
    yield "fault: the lease store crashes", effects.stale(crashed)


def _promotions(world: World) -> Iterator[Move]:
    budget = world.budget
    if not budget.promotions:
        return
    rows = {"with all changes": world.lease}
    if world.behind is not None:
        rows["without the last change"] = world.behind
    for label, row in rows.items():
        new = world._replace(
            budget=budget._replace(promotions=budget.promotions - 1), lease=store.crashed(row),
            timeline=f"{world.timeline}+", behind=None,
        )  # fmt: skip
        yield f"fault: the lease store is failed over, {label}", effects.stale(new)


def _of_the_link(world: World) -> Iterator[Move]:
    budget, link = world.budget, world.link
    if not budget.cuts or not link.open:
        return
    less = world._replace(budget=budget._replace(cuts=budget.cuts - 1))
    for kept, down in product(range(len(link.up) + 1), {(), link.down}):
        cut = link._replace(open=False, up=link.up[:kept], down=down)
        label = f"fault: the link breaks, {kept} and {len(down)} messages arrive"
        yield label, less._replace(link=cut)


def _by_others(world: World) -> Iterator[Move]:
    held, budget = world.alpha, world.budget
    if budget.resumes and held.guest == PAUSED:
        less = world._replace(budget=budget._replace(resumes=budget.resumes - 1))
        new = less._replace(alpha=held._replace(guest=RUNS, woken=True))
        yield "fault: virsh resume", effects.must_be_one(new)
    if budget.cards and held.filters == "all":
        less = world._replace(budget=budget._replace(cards=budget.cards - 1))
        yield "fault: a card is unplugged", less._replace(alpha=held._replace(filters="part"))


def _backup_restarts(world: World) -> World:
    """A watchdog restarts the backup's agent at once; the disk and the standby are unchanged."""
    new = world.beta._replace(task=None, seen=0, since=0, handed=False, ours=False)
    return world._replace(beta=new, link=world.link._replace(open=False, up=()))


def _power_off(world: World) -> World:
    held = world.alpha._replace(
        guest=DEAD, agent=None, watchdog=False, order=None, timer=None, page=NONE, shut=True,
        token=0, files=frozenset(), filters=world.alpha.filters or "all",
        heard=heard(world.alpha),
    )  # fmt: skip
    return world._replace(alpha=held, link=effects.hung_up(world))


def _controller(world: World) -> Iterator[Move]:
    """An operator ends the protection or requests a planned failover; recover cleans up."""
    held, budget = world.alpha, world.budget
    if not budget.orders or held.order is not None:
        return
    less = world._replace(budget=budget._replace(orders=budget.orders - 1))
    if held.agent is not None and not held.wish:
        for wish in ("end", "planned"):
            yield f"controller: {wish}", less._replace(alpha=held._replace(wish=wish))
    if held.shut:
        return
    if held.guest == DEAD:
        if held.agent is None and world.beta.guest == WAITS and world.beta.epoch:
            given = held._replace(order=Task("give", (), ()))
            yield "controller: gives the guest to its standby", less._replace(alpha=given)
        return
    if world.beta.guest == RUNS:
        yield "controller: ends the second copy", _ordered(less, define=False, gone=False)
    else:
        yield "controller: ends alpha's side", _ordered(less, define=True, gone=False)
        if world.beta.guest == WAITS and not world.beta.ours:
            removed = less.beta._replace(guest=GONE, agent=False, task=None)
            link = less.link._replace(open=False, up=())
            yield (
                "controller: ends both sides",
                _ordered(less._replace(beta=removed, link=link), define=True, gone=True),
            )


def _ordered(world: World, *, define: bool, gone: bool) -> World:
    task = Task("order", (define, gone), ())
    return world._replace(alpha=world.alpha._replace(order=task))
