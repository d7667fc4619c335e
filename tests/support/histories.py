"""A protected guest's key-value store and its clients, in time that is not real. Deterministic.

Epochs end every so many seconds and are committed a little later; only then the answers of that
epoch leave. When the primary dies the backup goes on from the last committed epoch. `Broken` says
which of that is left out.
"""

import heapq
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from vmckpt_lab.history import history
from vmckpt_lab.history.history import History, Kind
from vmckpt_lab.history.workload import Client
from vmckpt_lab.observer import messages

_WORD = 1 << 64


@dataclass
class Store:
    """The store of assets/prover.c."""

    run: int = 1
    recording: int = 0
    cells: dict[int, int] = field(default_factory=dict)
    sessions: dict[int, tuple[int, int]] = field(default_factory=dict)

    def answer(self, request: messages.Request) -> messages.Reply | None:
        if request.recording < self.recording:
            return None
        if request.recording > self.recording:
            self.recording, self.cells, self.sessions = request.recording, {}, {}
        last, before = self.sessions.get(request.session, (0, 0))
        if request.sequence < last:
            return None
        if request.sequence > last:
            before = self._carried_out(request.asked)
            self.sessions[request.session] = (request.sequence, before)
        return messages.Reply(
            recording=request.recording, session=request.session, sequence=request.sequence,
            run=self.run, before=before,
        )  # fmt: skip

    def _carried_out(self, asked: history.Input) -> int:
        before = self.cells.get(asked.key, 0)
        if asked.kind is Kind.WRITE or (asked.kind is Kind.CAS and before == asked.expected):
            self.cells[asked.key] = asked.value
        elif asked.kind is Kind.ADD:
            self.cells[asked.key] = (before + asked.value) % _WORD
        return before


class Broken(Enum):
    """What goes wrong in a failover."""

    RELEASED_EARLY = auto()
    """Answers leave before their epoch is committed."""
    OLD_EPOCH = auto()
    """The backup goes on from an epoch that is not the last one."""
    TWO_COPIES = auto()
    """The primary runs on, and answers every second client."""


@dataclass
class _Copy:
    """A copy of the guest."""

    store: Store
    holds: bool
    """Whether answers wait for a commit."""
    alive: bool = True
    held: list[messages.Reply] = field(default_factory=list)


class World:
    """The guest, its backup and its clients."""

    def __init__(
        self,
        seed: int,
        *,
        clients: int = 8,
        keys: int = 4,
        epoch: float | None = 0.2,
        dies: float | None = None,
        broken: Broken | None = None,
    ) -> None:
        """`epoch`: seconds, None for a guest without a backup. `dies`: when its host does."""
        self._dice = random.Random(seed)
        seen: dict[int, int] = {}
        self._clients = [
            Client(number, keys, random.Random(f"{seed} {number}"), seen)
            for number in range(clients)
        ]
        holds = epoch is not None and broken is not Broken.RELEASED_EARLY
        self._primary: _Copy = _Copy(Store(), holds)
        self._backup: _Copy | None = None
        self._committed = [Store()]
        self._broken, self._dies, self._epoch = broken, dies, epoch
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._turns = [0] * clients
        self.lines: list[str] = []

    def play(self, seconds: float) -> History:
        for client in self._clients:
            self._schedule(client, self._dice.uniform(0.0, 0.05))
        if self._epoch is not None:
            self._at(self._epoch, self._epoch_ends)
        if self._dies is not None:
            self._at(self._dies, self._host_dies)
        while self._events and self._events[0][0] <= seconds:
            at, _, action = heapq.heappop(self._events)
            action(at)
        return history.parse(self.lines)

    def _at(self, at: float, action: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, action))

    def _travels(self) -> float:
        return self._dice.uniform(0.0005, 0.004)

    def _schedule(self, client: Client, at: float) -> None:
        """Let a client act then, and not when it was going to before."""
        turn = self._turns[client.number] = self._turns[client.number] + 1

        def act(now: float) -> None:
            if turn == self._turns[client.number]:
                self._acts(client, now)
                self._schedule(client, max(client.wakes, now))

        self._at(at, act)

    def _acts(self, client: Client, now: float) -> None:
        ask = client.due(now)
        if ask is None:
            return
        if not ask.again:
            self.lines.append(history.call_line(client.number, ask.sequence, ask.asked, now))
        request = messages.Request(
            recording=1, session=client.number, sequence=ask.sequence, asked=ask.asked
        )
        self._at(now + self._travels(), lambda at: self._arrives(request, at))

    def _arrives(self, request: messages.Request, now: float) -> None:
        copy = self._primary
        if self._backup is not None and (not copy.alive or request.session % 2):
            copy = self._backup
        if not copy.alive:
            return
        reply = copy.store.answer(request)
        if reply is not None and copy.holds:
            copy.held.append(reply)
        elif reply is not None:
            self._leaves(reply, now)

    def _leaves(self, reply: messages.Reply, now: float) -> None:
        def act(at: float) -> None:
            line = history.return_line(
                reply.session, reply.sequence, at, output=reply.before, run=reply.run
            )
            self.lines.append(line)
            client = self._clients[reply.session]
            client.hear(reply.sequence, reply.before, at)
            self._schedule(client, client.wakes)

        self._at(now + self._travels(), act)

    def _epoch_ends(self, now: float) -> None:
        if not self._primary.alive or self._epoch is None:
            return
        captured = deepcopy(self._primary.store)
        waiting, self._primary.held = self._primary.held, []

        def commits(at: float) -> None:
            if not self._primary.alive:
                return
            self._committed.append(captured)
            for reply in waiting:
                self._leaves(reply, at)

        self._at(now + self._epoch / 4, commits)
        self._at(now + self._epoch, self._epoch_ends)

    def _host_dies(self, now: float) -> None:
        def takes_over(_at: float) -> None:
            back = 4 if self._broken is Broken.OLD_EPOCH else 1
            self._backup = _Copy(deepcopy(self._committed[-back]), holds=False)

        if self._broken is not Broken.TWO_COPIES:
            self._primary.alive = False
        else:
            self._primary.holds = False
        self._at(now + 0.4, takes_over)


def untold(known: History) -> History:
    """The same with writes that do not report what they replaced, as in an ordinary register."""
    return replace(
        known,
        operations=tuple(
            replace(one, output=None) if one.input.kind is Kind.WRITE else one
            for one in known.operations
        ),
    )
