"""Fakes on which the product's code runs in the model. All fakes call `replay.do`."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

from bench.model.replay import NOW, Again, age_of, do
from bench.model.world import ALPHA, BETA, TERMS
from vmckpt.capture.migration_settings import Undo
from vmckpt.errors import HypervisorError
from vmckpt.lease.client import LeaseClient
from vmckpt.replication.primary.lease_holder import LeaseHolder
from vmckpt.replication.protocol.connection import ConnectionLost
from vmckpt.replication.protocol.messages import (
    Ack,
    End,
    EpochEnd,
    Heartbeat,
    Hello,
    HelloAck,
    LayoutAck,
    Message,
)
from vmckpt.replication.session import Lease, ProtectionTerms, Session
from vmckpt.units import Seconds

UNDO = Undo(guest="g", capabilities={}, bandwidth=0, runs=True, folder="")
LEASE = Lease(url="postgresql://u@h/d", ttl=TERMS.ttl, margin=TERMS.margin)


def session(host: str) -> Session:
    """Return the session of a protection on one of its hosts."""
    return Session(
        role="primary" if host == ALPHA else "backup", session="s", guest="g", name="g",
        host=host, peer=BETA if host == ALPHA else ALPHA, uri="", lease=LEASE, disks=(),
        terms=ProtectionTerms(interval=Seconds(0.1), automatic=True), address="", port=0,
        owner=(0, 0), undo=UNDO.to_json(),
    )  # fmt: skip


class File:
    """A file in the session's directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def exists(self) -> bool:
        return bool(do("read", "file", self.name))

    def touch(self) -> None:
        do("touch", self.name)

    def unlink(self, *, missing_ok: bool = False) -> None:
        do("unlink", self.name)

    def read_text(self) -> str:
        """Return the token. Raises FileNotFoundError for other files."""
        if self.name != "token":
            raise FileNotFoundError(self.name)
        return str(do("read", "token"))

    def write_text(self, text: str) -> None:
        do("put", self.name, text)


class Folder:
    """The session's directory."""

    def __truediv__(self, name: str) -> File:
        return File(name)


FOLDER: Any = Folder()


def put(file: File, text: str, **_: object) -> None:
    """Replaces atomic_file.put."""
    file.write_text(text)


class Page:
    """The watchdog's page."""

    agent = 1

    @property
    def renewed(self) -> float:
        return float(do("read", "page"))

    @renewed.setter
    def renewed(self, sent: float) -> None:
        do("page", age_of(sent))

    @property
    def stopped(self) -> float:
        return float(do("read", "paused"))

    @stopped.setter
    def stopped(self, since: float) -> None:
        pass

    @property
    def lasts(self) -> float:
        return float(TERMS.lasts)

    def lose(self) -> None:
        self.renewed = float("-inf")

    def close(self) -> None:
        pass


class Enforcer:
    """The kernel's timer."""

    def arm(self, ends: float) -> None:
        do("arm", round(ends - NOW))

    def disarm(self) -> None:
        do("disarm")


class Process:
    """QEMU's process, held by a pidfd."""

    def __init__(self, what: str = "guest") -> None:
        self._what = what

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def lives(self) -> bool:
        return bool(do("read", "lives"))

    def end(self, _: object) -> None:
        do("end", self._what)


def clock() -> Seconds:
    """Return CLOCK_BOOTTIME of the host on which the code runs."""
    return Seconds(float(do("clock")))


class _Question:
    """Replaces the client's connection to the lease store."""

    def ask(self, statement: str, arguments: tuple[object, ...] = ()) -> dict[str, Any]:
        call = statement.partition(".")[2].partition("(")[0]
        told: dict[str, Any] = do("store", call, tuple(arguments))
        do("answer arrives")
        return told

    def close(self) -> None:
        pass


class Client(LeaseClient):
    """A real LeaseClient, with its connection and memory in the model."""

    def __init__(self, holder: str, name: str) -> None:
        mine: Any = self
        mine._line = _Question()
        self._holder, self._name, self._clock = holder, name, clock
        self.protected = False

    @property
    def _timeline(self) -> str:
        """The timeline of the client that renews; renewals of other clients do not count."""
        return str(do("read", "tenure", "timeline")) if self._name.startswith("r") else ""

    @_timeline.setter
    def _timeline(self, timeline: str) -> None:
        if self._name.startswith("r"):
            do("tenure", "timeline", timeline)

    @property
    def _beat(self) -> str:
        return "1" if do("read", "seen") else ""

    @_beat.setter
    def _beat(self, beat: str) -> None:
        do("saw", beat == "1")

    @property
    def _since(self) -> Seconds:
        return Seconds(float(do("read", "since")))

    @_since.setter
    def _since(self, at: float) -> None:
        do("since", age_of(at))


def _shared(name: str) -> Any:
    """Return a property for an attribute of the tenure that both threads of the agent use."""

    def get(self: Any) -> Any:
        return do("read", "tenure", name)

    def put_(self: Any, value: Any) -> None:
        do("tenure", name, bool(value) if name == "lost" else value)

    return property(get, put_)


class _Lock:
    """The lock of the tokens. The thread that holds the lock can acquire it again."""

    def __init__(self, thread: str) -> None:
        self._thread, self._depth = thread, 0

    def __enter__(self) -> None:
        if self._depth == 0:
            do("lock", self._thread)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            do("unlock")


class ModelTenure(LeaseHolder):
    """A real LeaseHolder, for one thread of the agent."""

    token = _shared("token")
    acquired = _shared("acquired")
    _changing = _shared("changing")
    _validated = _shared("validated")

    def __init__(self, thread: str, life: int) -> None:
        mine: Any = self
        mine._lease, mine._folder, mine._page = LEASE, FOLDER, Page()
        self._enforcer = Enforcer()
        self._client = Client(ALPHA, f"c{life}")
        self._renewer = Client(ALPHA, f"r{life}")
        mine._tokens = _Lock(thread)
        self._threads, self._busy, self.line = [], None, None
        mine._over = SimpleNamespace(is_set=lambda: False, set=lambda: None)

    @property
    def lost(self) -> str | None:
        return "lost" if do("read", "tenure", "lost") else None

    @lost.setter
    def lost(self, why: str | None) -> None:
        do("tenure", "lost", why is not None)

    @property
    def _renewed(self) -> float:
        return float(do("read", "renewed"))

    @_renewed.setter
    def _renewed(self, sent: float) -> None:
        do("tenure", "renewed", age_of(sent))


class Buffers:
    """The filters of the guest's network cards."""

    lost = 0

    def add(self) -> None:
        do("hold")

    def attach(self) -> None:
        pass

    def release(self) -> None:
        do("release")

    def keep(self) -> None:
        pass

    def hold_any_of(self, _: object) -> bool:
        return False

    def remove(self, _: object = ()) -> None:
        do("let out")

    def close_epoch(self) -> int:
        do("close epoch")
        return 0

    def collected(self) -> int:
        return 0

    def complete(self) -> bool:
        return bool(do("read", "filters"))


class Devices:
    """The guest's devices, which never change. An unplugged card only removes filters."""

    told, gone, dimms = False, (), ()

    def same(self) -> bool:
        return True

    still = same


class Found:
    """Replaces the module `network_buffer`: the filters that an earlier agent left."""

    @staticmethod
    def there(*_: object) -> bool:
        return bool(do("read", "filters"))

    @staticmethod
    def remove(*_: object) -> None:
        do("let out")


class Monitor:
    """QEMU's monitor."""

    host, guest, uri, name = ALPHA, "g", "", "g"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tell(self, command: str, arguments: object = None) -> None:
        if command in ("stop", "cont"):
            do(command)

    def ask(self, command: str, **_: object) -> Any:
        if command == "query-migrate":
            return {"status": "completed"}
        return {"status": "none"}

    def run_state(self) -> str:
        """Return the run state. Raises HypervisorError if QEMU is gone."""
        if not do("read", "lives"):
            raise HypervisorError("QEMU is gone", host=ALPHA)
        if not do("read", "paused"):
            return "running"
        return "paused" if do("read", "woken") else "postmigrate"

    def paused_by_user(self) -> bool:
        return False


class Drain:
    """The reader of the device state."""

    def __init__(self, _: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def hand_over(self, _: object) -> None:
        pass

    def ended(self, _: float) -> bool:
        return True

    def discard(self) -> None:
        pass


class Finder:
    """Finds the moment that the memory represents."""

    def prepare(self) -> None:
        pass

    def begin(self) -> Self:
        return self

    def result(self) -> list[Any]:
        return list(do("compare"))


class Wishes:
    """The controller's requests to the agent on alpha."""

    def has(self, wish: str) -> bool:
        return bool(do("read", "wish") == wish)

    @property
    def any(self) -> bool:
        return bool(do("read", "wish"))

    def drop(self, wish: str) -> None:
        do("drop", wish)

    def wait(self, _: object) -> bool:
        raise Again


class Quiet:
    """Accepts every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Memory(Quiet):
    """The guest's memory, whose content is not modelled. The standby always has the same blocks."""

    blocks = ()


class Line:
    """One end of the connection. Messages are tuples with the sender's token."""

    sent = received = 0
    heard = 0.0

    def __init__(self, end: str, token: Any) -> None:
        self._end, self._token = end, token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def send(self, message: Message) -> None:
        """Raises ConnectionLost."""
        match message:
            case Hello():
                do("send", self._end, ("hello", self._token(), message.captured))
            case HelloAck():
                do("send", self._end, ("welcome", self._token(), message.committed))
            case Ack():
                do("send", self._end, ("ack", self._token(), message.epoch))
            case End():
                do("send", self._end, ("end", self._token(), message.why))
            case _:
                pass  # refusals, heartbeats and memory layouts have no effect

    def seal(self, number: int, base: int, final: bool, captured: tuple[int, bool]) -> None:
        """Raises ConnectionLost."""
        do("send", self._end, ("seal", self._token(), number, base, final, *captured))

    def receive(self, _: object) -> Message | None:
        """Raises ConnectionLost."""
        return message_of(do("receive"))

    def expect(self, kind: type, _: object) -> Any:
        """Return the next message. Raises ConnectionLost, also for a message of another kind."""
        if kind is LayoutAck:
            return LayoutAck()
        found = self.receive(0)
        if not isinstance(found, kind):
            raise ConnectionLost("the other end says something else")
        return found


def message_of(told: tuple[Any, ...]) -> Message:
    """Convert a message of the model to the product's message."""
    match told:
        case ("hello", _, captured):
            return Hello(session="s", captured=captured)
        case ("welcome", _, committed):
            return HelloAck(session="s", committed=committed)
        case ("ack", _, epoch):
            return Ack(epoch=epoch)
        case ("end", _, why):
            return End(why=why)
        case ("seal", _, number, base, final, *_):
            return EpochEnd(epoch=number, base=base, messages=0, digest=b"", final=final, taken=0.0)
        case _:
            return Heartbeat(sent=0.0, note=b"{}")


@contextmanager
def lease(_: Session) -> Iterator[Client]:
    """Replaces teardown.lease: yields an order's own client."""
    yield Client(ALPHA, "o")
