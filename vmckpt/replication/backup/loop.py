"""The backup's loop: commits epochs to the standby, and takes over when it must.

One thread handles the messages. Two other threads accept connections and send heartbeats. Only the
primary's newest connection is used, since the primary reconnects only after it has given up the
previous connection.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmckpt.errors import VmckptError
from vmckpt.replication.backup import takeover
from vmckpt.replication.backup.epoch_stage import Stage
from vmckpt.replication.backup.lease_claimant import TakeoverClaim
from vmckpt.replication.backup.redo_log import StageFull
from vmckpt.replication.backup.standby import Standby
from vmckpt.replication.backup.takeover import Seen, Step
from vmckpt.replication.control_socket import Request, Requests
from vmckpt.replication.disks import resync
from vmckpt.replication.primary import memory
from vmckpt.replication.protocol import connection
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.memory_layout import Layout
from vmckpt.replication.protocol.messages import (  # fmt: skip
    HANDED_OVER,
    Ack,
    DeviceState,
    End,
    EpochEnd,
    Heartbeat,
    Hello,
    HelloAck,
    LayoutAck,
    MemoryLayout,
    Message,
    PageRequest,
    Pages,
    PeerRefused,
    WireError,
    Writes,
)
from vmckpt.replication.session import Session
from vmckpt.units import Seconds

_ACCEPT = Seconds(0.5)
_TURN = Seconds(0.02)
_HEARD = Seconds(2.0)
_WRONG = Seconds(2.0)
"""A primary that has answered for this long is alive, whatever a failover request assumed."""
BEAT = Seconds(0.1)


@dataclass(frozen=True, slots=True)
class TakeoverGranted:
    """The decision to run the guest on this host."""

    why: str
    decided: float
    """When the decision was made, by time.monotonic()."""
    silent: Seconds = Seconds(0.0)
    """How long the primary had been silent."""
    clock: Seconds | None = None
    """How far the guest's clock is meant to be ahead of the host's; None: not known."""
    line: PeerConnection | None = None
    """The connection to the primary, to report the takeover; None: not connected."""


class StandbyGone(VmckptError):
    """The standby's QEMU is gone: the guest cannot run on this host."""


class Backup:
    """The loop of the backup: it runs until a takeover, or until the protection ends."""

    def __init__(
        self, session: Session, folder: Path, *, stage: Stage, standby: Standby,
        claim: TakeoverClaim, requests: Requests, between: Callable[[], None],
        lives: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """`between` is called between two iterations of the loop, when the standby is in the state
        of the last committed epoch and does not change. `lives` returns whether the standby's QEMU
        is running.
        """
        self._session, self._folder = session, folder
        self._stage, self._standby, self._claim, self._requests = stage, standby, claim, requests
        self._between, self._lives = between, lives
        self._asked: float | None = None
        """When the primary began to answer although a failover request was pending."""
        self._newest: PeerConnection | None = None
        self._lock = threading.Lock()
        self._heard = time.monotonic()
        self._over: str | None = None
        self._handed_over = False
        self._final = stage.last is not None and stage.last.final
        self._peer: dict[str, Any] = {}
        self._says = "waiting for the primary"

    def run(self, server: socket.socket) -> TakeoverGranted | None:
        """Serve the primary until a takeover. Returns None if the protection ends first.

        Raises StandbyGone, StageError, and any error of the standby, which is then unusable.
        """
        accepting = threading.Thread(
            target=self._accept, args=(server,), name="accepting", daemon=True
        )
        beating = threading.Thread(target=self._beat, name="beating", daemon=True)
        accepting.start()
        beating.start()
        try:
            return self._loop()
        finally:
            self._over = self._over or "it ends"
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts

    def close(self) -> None:
        """Close the connection to the primary. Call this once nothing urgent is left to do."""
        if self._newest is not None:
            self._newest.close()

    def as_json(self) -> dict[str, Any]:
        """Return the full status, for users and other tools."""
        return {**self.note(), "primary": self._peer or None}

    def note(self) -> dict[str, Any]:
        """Return the status that heartbeats send to the primary.

        The primary's own report is left out: reports that contain each other would grow forever.
        """
        last = self._stage.last
        return {
            "role": "backup", "phase": "waiting", "committed": self._stage.committed,
            "ready": self._stage.committed > 0, "silent_s": self._silent(),
            "connected": self._newest is not None,
            "received": 0 if self._newest is None else self._newest.received,
            "epoch_age_s": None if last is None else max(0.0, time.time() - last.taken),
            "says": self._says,
        }  # fmt: skip

    def _silent(self) -> Seconds:
        line = self._newest
        heard = self._heard if line is None else max(self._heard, line.heard)
        return Seconds(time.monotonic() - heard)

    def _accept(self, server: socket.socket) -> None:
        while self._over is None:
            try:
                made = connection.accept(self._folder, server, limit=_ACCEPT)
            except OSError:
                time.sleep(_TURN)  # temporarily too many open files, or the socket was closed
                continue
            if made is None:
                continue
            line = PeerConnection(made, lambda: self._claim.token, takes=self._claim.takes)
            with self._lock:
                before, self._newest = self._newest, line
            if before is not None:
                before.close()

    def _beat(self) -> None:
        while self._over is None:
            time.sleep(BEAT)
            line = self._newest
            if line is not None:
                with suppress(ConnectionLost):
                    line.send(Heartbeat(sent=time.time(), note=json.dumps(self.note()).encode()))

    def _loop(self) -> TakeoverGranted | None:
        line: PeerConnection | None = None
        while self._over is None:
            if not self._lives():
                raise StandbyGone(f"{self._session.name}: the standby's QEMU is gone")
            if self._newest is not line:
                line = self._newest
                self._stage.discard()
            if line is None:
                time.sleep(_TURN)
            else:
                self._turn(line)
            if self._requests.has(Request.END):
                return None
            if (ours := self._ours()) is not None:
                return ours
            self._between()
        return None

    def _turn(self, line: PeerConnection) -> None:
        """Handle one message.

        Drop a connection that is lost, that delivers invalid data, or that delivers an epoch for
        which there is no space: the primary reconnects. Raises StageError, and any error of the
        standby.
        """
        try:
            message = line.receive(_TURN)
            if message is not None:
                self._take(line, message)
        except (ConnectionLost, WireError, ValueError, IndexError, StageFull) as exc:
            if not self._stage.applied:
                raise  # an epoch may be partly applied to the standby
            self._says = str(exc)
            self._heard = max(self._heard, line.heard)
            if not isinstance(exc, ConnectionLost):
                self._refuse(line, str(exc))
            with self._lock:
                if self._newest is line:
                    self._newest = None
            line.close()
            self._stage.discard()

    @staticmethod
    def _refuse(line: PeerConnection, why: str) -> None:
        """Send the reason, and wait for the primary to close the connection.

        Closing a socket that has unread data resets the connection, and the reason is lost.
        """
        give_up = time.monotonic() + _HEARD
        with suppress(ConnectionLost, WireError):
            line.send(PeerRefused(why=why))
            while time.monotonic() < give_up:
                line.receive(_TURN)

    def _take(self, line: PeerConnection, message: Message) -> None:
        stage = self._stage
        match message:
            case Hello():
                self._welcome(line, message)
            case PageRequest(file=file) if file < 0:
                line.send(resync.answer(message, self._standby.disks))
            case PageRequest():
                line.send(memory.answer(message, self._standby.memory))
            case MemoryLayout():
                self._fit(line, message)
            case Pages() | Writes() | DeviceState():
                (stage.take if message.epoch else stage.bulk)(message)
            case EpochEnd():
                self._commit(line, message)
            case Heartbeat():
                self._peer = json.loads(message.note or b"{}")
            case End():
                self._handed_over = message.why == HANDED_OVER
                if not self._handed_over:
                    self._over = message.why
                    with suppress(ConnectionLost):
                        line.send(message)  # confirms that it arrived
            case _:
                raise ValueError(f"the primary sent an unexpected {type(message).__name__}")

    def _fit(self, line: PeerConnection, message: MemoryLayout) -> None:
        """Give the standby the guest's blocks of memory.

        Raises ValueError if that fails; ConnectionLost, StageError.
        """
        try:
            changed = self._standby.fit(Layout.parse(message.data))
        except (VmckptError, OSError) as exc:
            raise ValueError(f"the standby's memory cannot match the guest's: {exc}") from exc
        if changed:
            self._stage.use(self._standby.memory)
        line.send(LayoutAck())

    def _commit(self, line: PeerConnection, seal: EpochEnd) -> None:
        """Commit, acknowledge and apply the epoch; apply it even if the acknowledgement fails."""
        epoch = self._stage.seal(seal)
        try:
            line.send(Ack(epoch=epoch))
        finally:
            self._final = seal.final
            self._stage.apply()
        self._says = "following the guest"

    def _welcome(self, line: PeerConnection, hello: Hello) -> None:
        if hello.session != self._session.session:
            raise ValueError("the primary belongs to another protection of the guest")
        self._final = False
        # A primary that connects is alive, whatever the operator assumed.
        self._requests.drop(Request.FAILOVER)
        if hello.captured == 0:
            self._stage.start_over()
        self._says = "synchronising with the primary"
        line.send(HelloAck(session=self._session.session, committed=self._stage.committed))

    def _ours(self) -> TakeoverGranted | None:
        """Return the takeover if the guest is to run on this host now, otherwise None."""
        seen = Seen(
            committed=self._stage.committed, silent=self._silent(),
            has_lease=self._session.lease is not None, automatic=self._session.terms.automatic,
            person=self._requests.has(Request.FAILOVER), final=self._final,
            handed_over=self._handed_over, moves=self._session.moves,
        )  # fmt: skip
        self._forget_wish(seen)
        decision = takeover.decide(seen, patience=self._claim.patience)
        if decision.step is Step.RUN:
            return self._taken(decision.why, seen)
        if decision.step is Step.ASK:
            try:
                if (why := self._claim.ask()) is not None:
                    return self._taken(f"{decision.why}; {why}", seen)
                self._says = self._claim.says
            except VmckptError as exc:
                self._says = str(exc)
        return None

    def _forget_wish(self, seen: Seen) -> None:
        """Drop a failover request if the primary keeps answering.

        Otherwise a short network failure hours later would trigger the failover. With a lease
        store, the lease decides, so the request stays.
        """
        if not seen.person or seen.has_lease or seen.moves or seen.silent > self._claim.patience:
            self._asked = None
            return
        now = time.monotonic()
        self._asked = self._asked or now
        if now - self._asked > _WRONG:
            self._requests.drop(Request.FAILOVER)
            self._says = "failover request dropped: the primary is answering"

    def _taken(self, why: str, seen: Seen) -> TakeoverGranted:
        ahead = self._peer.get("clock_ahead_s")
        clock = Seconds(ahead) if isinstance(ahead, int | float) else None
        return TakeoverGranted(why, time.monotonic(), seen.silent, clock, self._newest)
