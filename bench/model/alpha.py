"""The processes on the primary's host: the agent's two threads, and the controller's orders.

Each entry is a method of the product, or several methods in the order in which the product calls
them. It returns the next entry of the main thread, and the state that the Primary keeps until then.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.model import fakes
from bench.model.replay import Again, do
from bench.model.world import ALPHA
from vmckpt.agent.replication import handover, orders, primary, teardown
from vmckpt.agent.replication.primary import _Agent
from vmckpt.errors import VmckptError
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication.primary import acknowledgement, epoch_capture, lease_holder, loop
from vmckpt.replication.primary.epoch_capture import Capturer
from vmckpt.replication.primary.loop import Flight, Primary, Switched
from vmckpt.replication.primary.solo_permission import SoloPermission
from vmckpt.replication.protocol.connection import ConnectionLost
from vmckpt.replication.protocol.messages import WireError
from vmckpt.replication.watchdog import process

Fields = tuple[Any, ...]
Next = tuple[str, Fields]
_SESSION = fakes.session(ALPHA)


class _Reached(BaseException):
    """The main loop has reached its next step."""


def _reached(*_: object) -> Any:
    raise _Reached


class _Sender:
    """Sends an epoch as one message, which contains the moment of the capture."""

    bandwidth = None

    def __init__(self, line: fakes.Line, *_: object) -> None:
        self._line = line

    def memory(self, *_: object) -> None:
        pass

    writes = memory

    def finish(
        self, number: int, epoch: Any, _: object, *, base: int, final: bool, **__: object
    ) -> None:
        self._line.seal(number, base, final, tuple(epoch.changed))


class _Guest:
    """Passes the loop's actions on the guest to the world."""

    disks = None

    def __init__(self, agent: Any, monitor: Any, lease_holder: Any) -> None:
        self._agent, self._monitor, self._lease_holder = agent, monitor, lease_holder

    def note_unprotected(self, unprotected: bool) -> None:
        noted = fakes.File(teardown.ALONE)
        (noted.touch if unprotected else noted.unlink)()

    def note_switchover(self) -> None:
        fakes.File("switching").touch()

    def hand_over(self, line: Any) -> None:
        handover.hand_over(
            _SESSION, fakes.FOLDER, line, lease_holder=self._lease_holder,
            process=self._agent._process, stopped=0.0,
        )  # fmt: skip

    def resume(self) -> None:
        _Agent.resume(self._agent, self._monitor)


def _primary(
    life: int, fields: Fields, *, is_alone: bool = False
) -> tuple[Primary, fakes.ModelTenure]:
    """Return a real Primary with the state that it has kept."""
    held_tenure = fakes.ModelTenure("main", life)
    monitor: Any = fakes.Monitor()
    output, quiet = fakes.Buffers(), fakes.Quiet()
    mirrors: Any = SimpleNamespace(begin_again=lambda: do("mirrors"), end=lambda: do("no mirrors"))
    agent = _agent()
    parts: Any = SimpleNamespace(
        monitor=monitor, memory=fakes.Memory(), finder=None, logs=[], disks=None, buffers=output,
        capturer=Capturer(monitor, fakes.UNDO, finder=fakes.Finder(), output=output, logs=[],
                          still=lambda _: None),
        lease_holder=held_tenure, requests=fakes.Wishes(),
        leave=SoloPermission(needed=False), status=quiet,
        mirrors=mirrors,
        begun=False, held=False, whole=False, devices=fakes.Devices(),
        unprotected=is_alone, guest=_Guest(agent, monitor, held_tenure),
    )  # fmt: skip
    one: Any = Primary(_choosing(_SESSION), fakes.FOLDER, parts)
    one._number, one._acked, flight, one._whole, one._valid, one._begun, one._held = fields
    one._flight = None if flight is None else _flight(*flight)
    one._state, one._first_copy = b"", quiet
    return one, held_tenure


class _Terms:
    """The terms of a protection. The model chooses whether the wait `hold` is over."""

    interval, slowdown, bandwidth, max_pause = 0.1, 0.1, None, 0.5

    @property
    def hold(self) -> float:
        return float(do("hold is over"))


def _choosing(session: Any) -> Any:
    names = ("session", "host", "lease", "peer", "moves", "address", "port")
    return SimpleNamespace(terms=_Terms(), **{name: getattr(session, name) for name in names})


def _flight(number: int, moment: int, torn: bool) -> Flight:
    epoch: Any = SimpleNamespace(changed=[moment, torn], ends=(), state=b"", packets=0, pause=0.0)
    return Flight(number, epoch, [])


def _kept(one: Primary) -> Fields:
    flight = one._flight
    thing = None if flight is None else (flight.number, *flight.epoch.changed)
    return (one._number, one._acked, thing, one._whole, one._valid, one._begun, one._held)


def _agent() -> Any:
    return SimpleNamespace(
        _session=_SESSION, folder=fakes.FOLDER, _process=fakes.Process(), _page=fakes.Page(),
        _undo=fakes.UNDO,
    )  # fmt: skip


def enter(life: int, _: Fields) -> Next:
    """The agent starts: it continues the lease, or acquires it."""
    fakes.ModelTenure("main", life).__enter__()
    return "begin", ()


def begin(life: int, _: Fields) -> Next:
    """The agent examines what an earlier agent left."""
    held_tenure = fakes.ModelTenure("main", life)
    agent = _agent()
    if _Agent._was_given_away(agent, held_tenure):
        return "over", ()
    monitor: Any = fakes.Monitor()
    _Agent.resume(agent, monitor)
    begun = do("mirrors")
    alone = teardown.is_alone(fakes.FOLDER)
    found = primary.found_filters(_SESSION, fakes.FOLDER, monitor, alone=alone)
    held = found[1]
    whole = held and not begun and not held_tenure.acquired
    return _loop(life, (0, 0, None, whole, False, begun, held), alone=alone)


def _loop(life: int, fields: Fields, *, alone: bool) -> Next:
    """Return the first step of `Primary.run`."""
    one: Any = _primary(life, fields, is_alone=alone)[0]
    at = "connect"

    def forgo() -> None:
        nonlocal at
        at = "forgo"
        raise _Reached

    one._forgo_standby, one._connected = forgo, _reached
    try:
        one.run()
    except _Reached:
        return at, fields
    return "unprotect", fields


def forgo(life: int, fields: Fields) -> Next:
    """A filter is missing: the standby is invalidated before output is released."""
    one, _ = _primary(life, fields)
    one._forgo_standby()
    return "connect", _kept(one)


def connect(life: int, fields: Fields) -> Next:
    """Connect to the backup and synchronise the standby."""
    at, fields = _loop(life, fields, alone=True)  # `begin` has decided whether to forgo the standby
    return (at, fields) if at == "unprotect" else _tried(life, fields, _connect)


def _connect(one: Primary, line: Any) -> str:
    do("connect")
    one._brought_up(line)
    return "serve"


def serve(life: int, fields: Fields) -> Next:
    """Capture, send and release an epoch."""
    return _tried(life, fields, _serve)


def _serve(one: Primary, line: Any) -> str:
    turns = iter((lambda: do("epoch is due"), _reached))
    steps: Any = one  # the model replaces its methods
    steps._brought_up = _Sender
    steps._wait = lambda _: next(turns)()
    try:
        one._serve(line)
    except _Reached:
        return "serve"
    except Switched:
        teardown.switched(_SESSION, fakes.FOLDER)
        return "over"
    return "unprotect"


def _tried(life: int, fields: Fields, step: Callable[[Primary, Any], str]) -> Next:
    """Run a step of `Primary.run`, in which an error ends the connection."""
    one, held_tenure = _primary(life, fields)
    line: Any = fakes.Line("up", lambda: held_tenure.token)
    try:
        at = step(one, line)
    except (ConnectionLost, WireError, LeaseUnreachable, ValueError):
        at = "cut"
    return at, _kept(one)


def cut(life: int, fields: Fields) -> Next:
    """Handle the loss of the connection."""
    one, _ = _primary(life, fields)
    try:
        one._cut(ConnectionLost("gone"))
    except Again:
        pass
    return "connect", _kept(one)


def unprotect(life: int, fields: Fields) -> Next:
    """End the protection while its agent is running."""
    monitor: Any = fakes.Monitor()
    teardown.unprotect(_SESSION, fakes.FOLDER, monitor, fakes.ModelTenure("main", life))
    return "over", fields


def keep(life: int, _: Fields) -> Next:
    """Renew the lease once, in the agent's second thread."""
    one = fakes.ModelTenure("keep", life)
    try:
        one._renew()
    except VmckptError:
        pass
    if one.lost is not None:
        one._page.lose()
        return "lost", ()
    return "kept", ()


def order(define: bool, standby_gone: bool) -> Next:
    """The controller ends the rest of the protection on alpha."""
    told: Any = SimpleNamespace(
        define=define, standby_gone=standby_gone, guest="g", host=ALPHA, uri=""
    )
    orders._end_primary(told, _SESSION)
    return "done", ()


def give() -> Next:
    """The controller hands a guest that is gone over to its standby."""
    told: Any = SimpleNamespace(guest="g", owner="s")
    orders._give(told)
    return "done", ()


ENTRIES: dict[str, Callable[..., Any]] = {
    "enter": enter, "begin": begin, "forgo": forgo, "connect": connect, "serve": serve, "cut": cut,
    "unprotect": unprotect, "keep": keep, "order": order, "give": give,
}  # fmt: skip

_STILL = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 0.0, sleep=lambda _: None)
"""Replaces `time` where the model chooses how long something takes."""
_FILES = SimpleNamespace(put=fakes.put)


def _holds(_: object) -> fakes.Process | None:
    return fakes.Process() if do("read", "lives") else None


@contextmanager
def on_fakes() -> Iterator[None]:
    """Let the product's modules work on the model while the block runs."""
    identity = SimpleNamespace(runs=lambda _: do("read", "lives"), hold=_holds)
    timer = SimpleNamespace(
        armed=lambda _: do("read", "timer"), disarm=lambda _: do("disarm"),
        arm=lambda _, ends: fakes.Enforcer().arm(ends),
    )  # fmt: skip
    page = SimpleNamespace(open=lambda _: fakes.Page())
    nothing = fakes.Quiet()
    places: list[tuple[Any, str, Any]] = [
        (lease_holder, "boottime", fakes.clock), (lease_holder, "time", _STILL),
        (lease_holder, "atomic_file", _FILES),
        (loop, "time", _STILL), (loop, "Sender", _Sender), (acknowledgement, "time", _STILL),
        (epoch_capture, "Drain", fakes.Drain), (teardown, "lease", fakes.lease),
        (teardown, "identity", identity), (teardown, "lease_timer", timer),
        (teardown, "mirrors", nothing), (teardown, "define", nothing.any),
        (teardown, "libvirt_side", nothing), (teardown, "outcome", nothing.any),
        (teardown, "forget", lambda *_: do("forget")),
        (teardown, "network_buffer", SimpleNamespace(remove=lambda *_: do("let out"))),
        (primary, "Buffers", lambda *_: fakes.Buffers()),
        (primary, "network_buffer", fakes.Found),
        (orders, "identity", identity), (orders, "WatchdogPage", page),
        (orders, "Session", SimpleNamespace(read=lambda _: _SESSION)),
        (orders, "folder_of", lambda _: fakes.FOLDER), (orders, "mirrors", nothing),
        (orders, "QmpMonitor", lambda *_, **__: fakes.Monitor()),
        (orders, "_start", lambda _: do("start agent")),
        (process, "hold", lambda _: fakes.Process("agent")),
    ]  # fmt: skip
    with ExitStack() as stack:
        for where, name, what in places:
            stack.enter_context(mock.patch.object(where, name, what))
        yield
