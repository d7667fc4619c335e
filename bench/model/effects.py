"""Apply effects to the world. Each outcome is a new world, with the answer for the process."""

from collections.abc import Callable
from typing import Any

from bench.model import store
from bench.model.replay import NEVER, NONE, Effect, Task
from bench.model.world import (
    ALPHA,
    DEAD,
    PAUSED,
    RUNS,
    WAITS,
    Agent,
    Alpha,
    Beta,
    Link,
    World,
    heard,
)  # fmt: skip

Answer = tuple[str, Any]
Outcome = tuple[str, World, Answer]
"""A description, the world afterwards, and the answer."""
_DONE: Answer = ("value", None)
LATEST = 2
"""Maximum number of requests to the lease store that arrive after their senders gave up."""


class Violation(Exception):
    """An invariant is violated."""


class Blocked(Exception):
    """The effect must wait: a lock is held, or no message has arrived."""


def outcomes(world: World, process: str, effect: Effect) -> list[Outcome]:
    """Return all possible outcomes of an effect. `process`: main, keep, order or beta.

    Raises Violation, Blocked.
    """
    if effect.name == "store":
        return _store(world, *effect.args)
    if effect.name == "answer arrives":
        return [(f"{process}: has the answer", world, _DONE)]
    if effect.name in _CHOICES:
        return _CHOICES[effect.name](world, *effect.args)
    if effect.name in _OF_QEMU and world.alpha.guest == DEAD:
        return [(f"{process}: QEMU is gone", world, ("raise", "gone"))]
    if process == "beta":
        new, answer = _BETA[effect.name](world, *effect.args)
    else:
        new, answer = _ALPHA[effect.name](world, *effect.args)
    return [(f"{process}: {effect.name} {_shown(effect.args)}".rstrip(), new, answer)]


def local(world: World, process: str, effect: Effect) -> tuple[World, Answer] | None:
    """Return the outcome of an effect that needs no step of its own; None for other effects.

    Such an effect only reads, or changes only the process's own memory.
    """
    if effect.name == "clock":
        return world, ("age", 0)
    if effect.name == "read":
        known = _read_beta(world.beta) if process == "beta" else _read_alpha(world.alpha)
        name, *more = effect.args
        return world, known[name](*more)
    made = _LOCAL.get(effect.name)
    return None if made is None else made(world, *effect.args)


def _shown(args: tuple[Any, ...]) -> str:
    return " ".join(str(one) for one in args)


# -- reads -----------------------------------------------------------------------------------------


def _read_alpha(alpha: Alpha) -> dict[str, Callable[..., Answer]]:
    agent = alpha.agent
    return {
        "file": lambda name: ("value", name in alpha.files and not alpha.shut),
        "token": lambda: ("value", alpha.token),
        "page": lambda: ("age", alpha.page),
        "renewed": lambda: ("age", NEVER if agent is None else agent.renewed),
        "tenure": lambda name: ("value", getattr(agent, name)),
        "lives": lambda: ("value", alpha.guest != DEAD),
        "paused": lambda: ("value", alpha.guest == PAUSED),
        "woken": lambda: ("value", alpha.woken),
        "filters": lambda: ("value", alpha.filters == "all"),
        "timer": lambda: ("value", alpha.timer),
        "wish": lambda: ("value", alpha.wish),
    }


def _read_beta(beta: Beta) -> dict[str, Callable[..., Answer]]:
    return {
        "token": lambda: ("value", beta.token),
        "epoch": lambda: ("value", beta.epoch),
        "final": lambda: ("value", beta.final),
        "seen": lambda: ("value", beta.seen),
        "since": lambda: ("age", beta.since),
    }


# -- the lease store -------------------------------------------------------------------------------


def _store(world: World, call: str, args: tuple[Any, ...]) -> list[Outcome]:
    """The store answers, or the process gives up, and the request may still arrive."""
    new, told = asked(world, call, args)
    found: list[Outcome] = [(f"store: {call} {told['said']}", new, ("told", tuple(told.items())))]
    if world.budget.silences:
        lost = world._replace(
            budget=world.budget._replace(silences=world.budget.silences - 1),
            late=(*world.late, (call, args))[-LATEST:],
        )
        found.append((f"store: {call} has no answer", lost, ("raise", "unreachable")))
    return found


def asked(world: World, call: str, args: tuple[Any, ...]) -> tuple[World, store.Told]:
    """The store receives a request. After a renewal, the beats that beta has seen are outdated."""
    before = world.lease
    lease, told = store.ask(before, call, args, world.timeline)
    changed = lease.age == 0 and (
        (call == "renew_on" and told["said"] == "done") or lease.token != before.token
    )
    new = world._replace(lease=lease)
    if world.budget.promotions and (lease.token, lease.state) != (before.token, before.state):
        new = new._replace(behind=before._replace(age=0))
    return (stale(new) if changed else new), told


def stale(world: World) -> World:
    """Mark the beats that beta has seen, or is about to receive, as outdated."""
    task = world.beta.task
    if task is not None:
        answers = tuple(
            (kind, _renamed(value)) if kind == "told" else (kind, value)
            for kind, value in task.answers
        )
        task = Task(task.entry, task.args, answers)
    late = tuple(
        (call, (*args[:3], "0", *args[4:]) if call == "take_over" else args)
        for call, args in world.late
    )
    return world._replace(beta=world.beta._replace(seen=0, task=task), late=late)


def _renamed(told: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, "0" if name == "beat" else value) for name, value in told)


# -- alpha -----------------------------------------------------------------------------------------


def _alpha(world: World, **changes: Any) -> tuple[World, Answer]:
    return world._replace(alpha=world.alpha._replace(**changes)), _DONE


def _lease_holder(world: World, name: str, value: Any) -> tuple[World, Answer]:
    agent = world.alpha.agent
    assert agent is not None
    return _alpha(world, agent=agent._replace(**{name: value}))


def _lock(world: World, thread: str) -> tuple[World, Answer]:
    agent = world.alpha.agent
    if agent is None or agent.lock:
        raise Blocked
    return _lease_holder(world, "lock", thread)


def _put(world: World, name: str, text: str) -> tuple[World, Answer]:
    return _alpha(world, token=int(text)) if not world.alpha.shut else (world, _DONE)


def _touch(world: World, name: str) -> tuple[World, Answer]:
    return _alpha(world, files=world.alpha.files | {name})


def _unlink(world: World, name: str) -> tuple[World, Answer]:
    return _alpha(world, files=world.alpha.files - {name})


def _arm(world: World, ends: int) -> tuple[World, Answer]:
    if world.alpha.guest == DEAD:
        return world, _DONE
    if ends <= 0:
        return _alpha(world, guest=DEAD, timer=None)
    return _alpha(world, timer=ends)


def _end(world: World, what: str) -> tuple[World, Answer]:
    if what == "agent":
        new, _ = _alpha(world, agent=None)
        return new._replace(link=hung_up(world)), _DONE
    return _alpha(world, guest=DEAD, timer=None)


def hung_up(world: World) -> Link:
    """Return the connection after alpha's end was closed."""
    return world.link._replace(open=False, down=())


def _stop(world: World) -> tuple[World, Answer]:
    return _alpha(world, guest=PAUSED, woken=False)


def _cont(world: World) -> tuple[World, Answer]:
    if world.alpha.guest != PAUSED:
        return world, _DONE
    return runs_on_alpha(world), _DONE


def runs_on_alpha(world: World) -> World:
    """Start the guest's vCPUs on alpha. Raises Violation."""
    new = world._replace(alpha=world.alpha._replace(guest=RUNS))
    return must_be_one(new)


def must_be_one(world: World) -> World:
    """Return the world. Raises Violation if the guest runs twice."""
    if world.alpha.guest == RUNS and world.beta.guest == RUNS:
        raise Violation("the guest runs on both hosts")
    return world


def _close_epoch(world: World) -> tuple[World, Answer]:
    return _alpha(world, heard=heard(world.alpha), moment=world.alpha.moment + 1)


def _release(world: World) -> tuple[World, Answer]:
    """Release the output of closed epochs."""
    return _speaks(world, world.alpha.moment - 1)


def _let_out(world: World) -> tuple[World, Answer]:
    new, done = _speaks(world, world.alpha.moment)
    return new._replace(alpha=new.alpha._replace(filters="")), done


def _speaks(world: World, moment: int) -> tuple[World, Answer]:
    if world.beta.guest == RUNS:
        raise Violation("a copy's output is released while the other one runs")
    lease, beta = world.lease, world.beta
    eligible = lease.state == "protected" and lease.holder == ALPHA and beta.guest == WAITS
    if eligible and store.confirmed(lease, world.timeline) and beta.moment < moment:
        raise Violation("output is released that the standby has not, and it may take over")
    return _alpha(world, heard=max(world.alpha.heard, moment))


def _hold(world: World) -> tuple[World, Answer]:
    return _alpha(world, filters="all", heard=heard(world.alpha))


def _compare(world: World) -> tuple[World, Answer]:
    """Return the captured moment, and whether the guest ran during the capture."""
    return world, ("value", (world.alpha.moment - 1, world.alpha.woken))


def _mirrors(world: World) -> tuple[World, Answer]:
    new, _ = _alpha(world, mirrors=True)
    return new, ("value", not world.alpha.mirrors)


def _forget(world: World) -> tuple[World, Answer]:
    return _alpha(world, shut=True, page=NONE, token=0, files=frozenset())


def agent_begins(world: World) -> World:
    """Start a new agent, unless another agent is running."""
    held = world.alpha
    if held.agent is not None or held.shut:
        return world
    agent = Agent(token=held.token, life=(held.lives + 1) % 3)
    return world._replace(alpha=held._replace(lives=agent.life, agent=agent))


_ALPHA: dict[str, Callable[..., tuple[World, Answer]]] = {
    "page": lambda world, age: _alpha(world, page=age),
    "arm": _arm,
    "disarm": lambda world: _alpha(world, timer=None),
    "touch": _touch, "unlink": _unlink, "put": _put,
    "lock": _lock, "end": _end, "stop": _stop, "cont": _cont, "compare": _compare,
    "close epoch": _close_epoch,
    "release": _release, "let out": _let_out, "hold": _hold,
    "mirrors": _mirrors, "no mirrors": lambda world: _alpha(world, mirrors=False),
    "forget": _forget, "start agent": lambda world: (agent_begins(world), _DONE),
}  # fmt: skip


# -- the connection --------------------------------------------------------------------------------


def _send(world: World, end: str, message: tuple[Any, ...]) -> list[Outcome]:
    link = world.link
    if not link.open:
        return [(f"{end}: cannot send", world, ("raise", "cut"))]
    up, down = (*link.up, message), (*link.down, message)
    sent = link._replace(up=up) if end == "up" else link._replace(down=down)
    new = world._replace(link=sent)
    return [(f"{end}: {message}", new, _DONE)]


def _receive(world: World) -> list[Outcome]:
    """Receive a message. Messages that arrived before the link broke are still received."""
    link = world.link
    if not link.down:
        if link.open:
            raise Blocked
        return [("alpha: finds the link cut", world, ("raise", "cut"))]
    told, *rest = link.down
    agent = world.alpha.agent
    if agent is not None and told[1] > agent.token:
        # An agent rejects messages with a newer token than its own.
        new = world._replace(link=hung_up(world))
        return [("alpha: refuses a newer token", new, ("raise", "cut"))]
    new = world._replace(link=link._replace(down=tuple(rest)))
    return [(f"alpha: gets {told}", new, ("value", told))]


def _connect(world: World) -> list[Outcome]:
    if not world.beta.agent:
        return [("alpha: cannot connect", world, ("raise", "cut"))]
    new = world._replace(link=world.link._replace(open=True, up=(), down=()))
    return [("alpha: connects", new, _DONE)]


def _due(world: World) -> list[Outcome]:
    """Return the events that may end the wait for the next epoch."""
    alpha = world.alpha
    if not world.link.open:
        return [("main: finds the link cut", world, ("raise", "cut"))]
    if alpha.wish:
        return [(f"main: the controller wants {alpha.wish}", world, ("value", False))]
    if alpha.moment >= world.budget.moments + 1 or alpha.guest != RUNS:
        raise Blocked
    return [("main: an epoch is due", world, ("value", True))]


def _hold_is_over(world: World) -> list[Outcome]:
    return [("main: waits", world, ("value", 1.0)), ("main: waits no more", world, ("value", -1.0))]


_CHOICES: dict[str, Callable[..., list[Outcome]]] = {
    "send": _send, "receive": _receive, "connect": _connect, "epoch is due": _due,
    "hold is over": _hold_is_over,
}  # fmt: skip


# -- beta ------------------------------------------------------------------------------------------


def _beta(world: World, **changes: Any) -> tuple[World, Answer]:
    return world._replace(beta=world.beta._replace(**changes)), _DONE


def _commit(world: World, epoch: int, final: bool, moment: int, torn: bool) -> tuple[World, Answer]:
    if torn:
        raise Violation("an epoch is committed that is not of one moment")
    return _beta(world, epoch=epoch, moment=moment, final=final)


def _start_guest(world: World) -> tuple[World, Answer]:
    beta = world.beta
    if beta.guest != WAITS:
        return world, _DONE
    if beta.moment < heard(world.alpha):
        raise Violation("output that was released is forgotten by the standby that takes over")
    new, done = _beta(world, guest=RUNS)
    return must_be_one(new), done


_BETA: dict[str, Callable[..., tuple[World, Answer]]] = {
    "put": lambda world, _, text: _beta(world, token=int(text)),
    "knows": lambda world, token: _beta(world, token=token),
    "commit": _commit, "start guest": _start_guest,
    "start over": lambda world: _beta(world, epoch=0, moment=0, final=False),
}  # fmt: skip
_OF_QEMU = ("stop", "cont", "close epoch", "release", "let out", "hold")
_LOCAL: dict[str, Callable[..., tuple[World, Answer]]] = {
    "drop": lambda world, _: _alpha(world, wish=""),
    "tenure": _lease_holder,
    "unlock": lambda world: _lease_holder(world, "lock", ""),
    "saw": lambda world, newest: _beta(world, seen=int(newest)),
    "since": lambda world, age: _beta(world, since=age),
}
