"""A backup at work, and the primary's end of lines to it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tests.support.replicas import SESSION, SHORT, Ends, session, two_ends
from tests.support.staging import EMPTY, Epoch, Standby, World, epoch, seal
from vmckpt.errors import VmckptError
from vmckpt.replication.backup import loop as loops
from vmckpt.replication.backup.epoch_stage import Stage
from vmckpt.replication.backup.loop import Backup, TakeoverGranted
from vmckpt.replication.control_socket import Request, Requests
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.messages import Ack, Hello, HelloAck
from vmckpt.replication.session import ProtectionTerms
from vmckpt.replication.test_failover.pause import LoopPause
from vmckpt.units import Seconds

AUTOMATIC = ProtectionTerms(interval=None, automatic=True)


class Claim:
    """A lease that can be had once a test says so."""

    def __init__(self) -> None:
        self.token = 1
        self.patience = Seconds(0.05)
        self.says = "the lease cannot be taken over for another 1.00 s"
        self.free = False
        self.broken = False
        self.asked = 0

    def takes(self, token: int) -> bool:
        self.token = max(self.token, token)
        return token == self.token

    def ask(self) -> str | None:
        self.asked += 1
        if self.broken:
            raise VmckptError("the witness gave no answer")
        return "took over the lease with token 2" if self.free else None

    def close(self) -> None:
        pass


@dataclass
class Following:
    """A backup at work, and the primary's end of lines to it."""

    ends: Ends
    standby: Standby
    stage: Stage
    stack: ExitStack
    claim: Claim = field(default_factory=Claim)
    requests: Requests = field(default_factory=Requests)
    standstill: LoopPause = field(default_factory=LoopPause)
    told: list[TakeoverGranted | None] = field(default_factory=list)
    raised: list[BaseException] = field(default_factory=list)

    def begin(self, lives: Callable[[], bool] = lambda: True, **changes: Any) -> Backup:
        told = session(role="backup", disks=(), **changes)
        self.backup = Backup(
            told, self.ends.backup, stage=self.stage, standby=cast("Any", self.standby),
            claim=self.claim, requests=self.requests, between=self.standstill.turn,
            lives=lives,
        )  # fmt: skip
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.stack.callback(self._end)
        return self.backup

    def _run(self) -> None:
        try:
            self.told.append(self.backup.run(self.ends.server))
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            self.raised.append(exc)

    def _end(self) -> None:
        self.requests.add(Request.END)
        self.thread.join(5.0)
        assert not self.thread.is_alive()
        self.backup.close()

    def line(self, token: int = 1) -> PeerConnection:
        """A new line of the primary's, which listens to any token."""
        made = PeerConnection(self.ends.connect(), lambda: token, takes=lambda _: True)
        return self.stack.enter_context(made)

    def hello(self, captured: int = 0, token: int = 1) -> tuple[PeerConnection, HelloAck]:
        line = self.line(token)
        line.send(Hello(session=SESSION, captured=captured))
        return line, line.expect(HelloAck, SHORT)

    def world(self) -> World:
        """What the standby is. Only while the backup does nothing."""
        return self.standby.world(self.stage)

    def came(self) -> TakeoverGranted | None:
        """What it returns, which it does by itself."""
        self.thread.join(5.0)
        assert not self.thread.is_alive()
        assert self.raised == []
        return self.told[0]


def send(line: PeerConnection, sent: Epoch) -> None:
    for part in sent.parts:
        line.send(part)
    line.send(sent.seal)


def commit(line: PeerConnection, *sent: Epoch) -> None:
    for one in sent:
        send(line, one)
        assert line.expect(Ack, SHORT) == Ack(epoch=one.number)


ONE = epoch(1, EMPTY)
TWO = epoch(2, ONE.after)
FINAL = Epoch(
    number=2, parts=TWO.parts, seal=seal(2, 1, list(TWO.parts), final=True), after=TWO.after
)  # fmt: skip


@contextmanager
def following(monkeypatch: pytest.MonkeyPatch) -> Iterator[Following]:
    monkeypatch.setattr(loops, "_ACCEPT", Seconds(2.0))  # a handshake on a busy machine
    monkeypatch.setattr(loops, "BEAT", Seconds(0.02))
    monkeypatch.setattr(loops, "_HEARD", Seconds(0.3))
    with two_ends() as ends, ExitStack() as stack:
        folder = ends.primary.parent
        standby = Standby(folder, folder / "disk")
        stage = stack.enter_context(standby.stage())
        yield Following(ends, standby, stage, stack)


def refusal(line: PeerConnection) -> str:
    """Why the backup goes on no more with this line."""
    with pytest.raises(ConnectionLost, match="refused to continue") as told:
        line.expect(Ack, SHORT)
    return str(told.value)


def refused_to_run(one: Following) -> bool:
    """Whether it still waits although a person wants it to run."""
    one.thread.join(0.15)
    return one.thread.is_alive()
