"""Revert fixes one at a time: the model must find the violation that each fix prevents.

Each entry replaces a decision of the product with the code before a fix, or with a plausible
mistake.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from bench.model import fakes, starts, store
from bench.model.moves import Moves
from bench.model.starts import QUIET
from bench.model.world import OLD, Budget, World
from vmckpt.agent.replication import orders, primary, teardown
from vmckpt.capture.memory.shared_memory import PausedCapture
from vmckpt.lease import terms
from vmckpt.replication.backup.lease_claimant import LeaseClaim
from vmckpt.replication.backup.loop import Backup
from vmckpt.replication.primary.lease_holder import LeaseHolder
from vmckpt.replication.primary.loop import Primary
from vmckpt.replication.protocol.messages import Ack, EpochEnd
from vmckpt.units import Seconds

Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverted:
    """A reverted fix."""

    name: str
    patches: Callable[[], list[Patch]]
    budget: Budget
    """Just enough faults for the violation to occur, so that it is found quickly."""
    start: str = "protected"
    """Name of the start; see `starts`."""
    first: tuple[str, ...] = ()
    """Beginnings of the labels of the first steps. After these, anything may happen."""
    timer: bool = True
    """Whether the kernel's timer is used."""

    def begins(self) -> World:
        """Return the world in which the search begins. The fix is not reverted before."""
        world, moves = starts.start(self.start, self.budget), Moves()
        for words in self.first:
            world = next(new for label, new in moves(world) if label.startswith(words))
        return world if self.timer else world._replace(alpha=world.alpha._replace(timer=None))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Revert the fix while the block runs."""
        patches = self.patches() if self.timer else [*self.patches(), (fakes, "Enforcer", _NoTimer)]
        with ExitStack() as stack:
            for where, name, what in patches:
                stack.enter_context(mock.patch.object(where, name, what))
            yield


def _armed_too_late(self: LeaseHolder) -> None:
    """Makes the standby eligible before the timer is armed."""
    with self._tokens:
        self._renew()
        self.check()
        assert self._client is not None
        self._client.validate(self.token)
        self._enforce(self._renewed)


def _speaks_alone_first(self: Primary, why: str) -> bool:
    """Releases output before the standby is invalidated."""
    self._valid = False
    self._let_out()
    self._parts.lease_holder.invalidate()
    self._parts.guest.note_unprotected(True)
    self._whole = self._begun = False
    return True


def _lets_both_speak(session: Any, folder: Any) -> list[str]:
    """Removes the filters of a copy whose lease another host holds."""
    orders._stop_agent(folder)
    monitor: Any = fakes.Monitor()
    teardown.unprotect(session, folder, monitor)
    return []


def _stops_without_asking(session: Any, folder: Any) -> None:
    """Leaves the standby eligible while the protection ends on this host."""
    orders._stop_agent(folder)


def _unprotects_first(session: Any, folder: Any, monitor: Any, held: Any = None) -> None:
    """Releases output before the standby is invalidated."""
    fakes.Buffers().remove()
    if held is not None:
        held.invalidate()
    teardown.forget(session, folder)


def _acknowledged_first(self: Backup, line: Any, seal: EpochEnd) -> None:
    """Sends the acknowledgement before the epoch is committed."""
    line.send(Ack(epoch=seal.epoch))
    self._stage.seal(seal)
    self._final = seal.final


def _released_first(self: Primary, line: Any, sender: Any, *, final: bool) -> None:
    """Releases output when its epoch was sent, not when it was acknowledged."""
    epoch = self._parts.capturer.take(goes_on=not final)
    self._number += 1
    sender.finish(self._number, epoch, None, base=self._acked, final=final, taken=0.0)
    self._parts.buffers.release()
    line.receive(0)
    self._acked = self._number


def _removes_what_is_left(*_: Any, alone: bool) -> tuple[fakes.Buffers, bool]:
    """Removes all filters at once if one filter is missing."""
    held = fakes.Found.there() and not alone
    if not held:
        fakes.Found.remove()
    return fakes.Buffers(), held


def _renewed_when_answered(self: LeaseHolder) -> None:
    """Counts the duration of a renewal from its answer."""
    with self._tokens:
        assert self._renewer is not None
        if self._changing:
            self._change()
        if self._renewer.renew(self.token) is None:
            self.lost = "lost"
            return
        self._renewed = fakes.clock()
        if self._page.renewed:
            self._enforce(self._renewed)


def _disarmed_first(self: LeaseHolder) -> None:
    """Disarms the timer before the standby is invalidated."""
    self._page.renewed = 0.0
    self._disarm()
    assert self._client is not None
    self._kept(self._client.invalidate(self.token))
    self._changing = False


class _NoTimer:
    """No timer: only the watchdog kills the guest."""

    def arm(self, ends: float) -> None:
        pass

    def disarm(self) -> None:
        pass


def _takes_over_at_once(self: LeaseClaim) -> str | None:
    """Takes over because of silence alone."""
    return "it is silent"


def _nothing(*_: object) -> None:
    pass


_SECOND_LIMIT = property(lambda self: Seconds(self.ttl + self.margin))
_WATCHED = (
    "store: take_over", "beta: has", "store: look", "beta: has", *["a tick"] * OLD,
)  # fmt: skip
"""Beta has seen the last renewal for as long as it must."""
_KILLS = QUIET._replace(agents=1, watchdogs=1)
_ORDERS = QUIET._replace(orders=1)

ALL = (
    Reverted(
        name="no timer in the kernel: agent and watchdog are killed together",
        patches=list, budget=_KILLS, timer=False,
    ),
    Reverted(
        name="the timer is armed after the standby is eligible",
        patches=lambda: [(LeaseHolder, "validate", _armed_too_late)], start="committed",
        budget=_KILLS, first=("fault: the watchdog",),
    ),
    Reverted(
        name="the timer is disarmed before the standby is invalidated",
        patches=lambda: [(LeaseHolder, "_change", _disarmed_first)], budget=_KILLS._replace(cuts=1),
        first=("fault: the link breaks", "main: finds the link cut", "main: waits no more"),
    ),
    Reverted(
        name="ending a protection lets a second copy speak",
        patches=lambda: [(orders, "_end_second_copy", _lets_both_speak)],
        budget=_KILLS._replace(orders=1), timer=False,
        first=("fault: alpha's agent", "fault: the watchdog"),
    ),
    Reverted(
        name="ending a protection leaves the standby eligible",
        patches=lambda: [(orders, "_stop_safely", _stops_without_asking)], budget=_ORDERS,
    ),
    Reverted(
        name="unprotecting releases before it invalidates",
        patches=lambda: [(teardown, "unprotect", _unprotects_first)],
        budget=_ORDERS._replace(cuts=1), first=("fault: the link breaks", "controller: end"),
    ),
    Reverted(
        name="the guest speaks alone before its standby is invalidated",
        patches=lambda: [(Primary, "_run_unprotected", _speaks_alone_first)],
        budget=QUIET._replace(cuts=1),
    ),
    Reverted(
        name="what is left of the filters is removed when an agent begins",
        patches=lambda: [(Primary, "_forgo_standby", _nothing),
                         (primary, "found_filters", _removes_what_is_left)],
        budget=QUIET._replace(cards=1, agents=1),
    ),
    Reverted(
        name="a lease store that was failed over lets its standby take over unconfirmed",
        patches=lambda: [(store, "confirmed", lambda *_: True)],
        budget=QUIET._replace(promotions=1, cuts=1),
    ),
    Reverted(
        name="a renewal from before the lease store's failover confirms the standby",
        patches=lambda: [(store, "confirms", lambda *_: True)],
        budget=QUIET._replace(promotions=1, cuts=1, silences=1),
        first=("a tick", "keep: lock", "store: renew_on has no answer", "fault: the link breaks",
               "main: finds the link cut", "main: waits no more", "main: lock main"),
    ),
    Reverted(
        name="an epoch during which the guest ran is committed",
        patches=lambda: [(PausedCapture, "_must_stand", _nothing)],
        budget=QUIET._replace(resumes=1, moments=2),
    ),
    Reverted(
        name="an epoch is acknowledged before it is committed",
        patches=lambda: [(Backup, "_commit", _acknowledged_first)],
        budget=QUIET._replace(backups=1, moments=2), start="sent",
    ),
    Reverted(
        name="output is released before its epoch is acknowledged",
        patches=lambda: [(Primary, "_cycle", _released_first)],
        budget=QUIET._replace(moments=2),
    ),
    Reverted(
        name="output is released without a look at the lease",
        patches=lambda: [(LeaseHolder, "check", _nothing)], budget=_KILLS, timer=False,
    ),
    Reverted(
        name="a renewal is counted from its answer",
        patches=lambda: [(LeaseHolder, "_renew", _renewed_when_answered)], budget=QUIET,
        start="renewed", first=_WATCHED,
    ),
    Reverted(
        name="the lease lasts as long as others wait",
        patches=lambda: [(terms.LeaseTerms, "lasts", _SECOND_LIMIT)],
        budget=QUIET._replace(drifts=1),
    ),
    Reverted(
        name="silence alone lets the standby run",
        patches=lambda: [(LeaseClaim, "ask", _takes_over_at_once)], budget=QUIET,
    ),
)  # fmt: skip
