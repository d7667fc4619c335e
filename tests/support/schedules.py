"""Schedules, played for weeks against stores that are only sets."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, tzinfo
from typing import Any

from vmckpt.model.guest import GuestState
from vmckpt.policy import calendar
from vmckpt.policy.model import Check, Schedule
from vmckpt.scheduler.agenda import (
    GuestPlace,
    Held,
    Order,
    Scene,
    Trouble,
    agenda,
    troubled,
)
from vmckpt.scheduler.jobs import (
    CollectGarbage,
    CopySnapshot,
    CreateGroup,
    CreateSnapshot,
    PruneSnapshots,
    VerifySnapshots,
    Work,
)
from vmckpt.snapshot.retention import Kept

DAY, HOUR = 86400.0, 3600.0
BEGIN = datetime(2026, 3, 2, 12, tzinfo=UTC).timestamp()
"""A Monday."""
WEB = GuestPlace(uuid="w", name="web1", host="alpha", state=GuestState.RUNNING)
DB = GuestPlace(uuid="d", name="db1", host="beta", state=GuestState.RUNNING)


def order(when: str, place: GuestPlace = WEB, name: str = "auto", **more: Any) -> Order:
    read = calendar.parse(when)
    schedule = Schedule(name=name, when=read, text=when)
    return Order(
        place=place, policy="mine", schedule=replace(schedule, **more), store="near", when=read
    )


@dataclass
class World:
    """Stores, guests and a service that does at once what it is told."""

    orders: list[Order]
    zone: tzinfo = UTC
    now: float = BEGIN
    stores: dict[str, dict[str, Held]] = field(default_factory=lambda: {"near": {}, "far": {}})
    down: set[str] = field(default_factory=set)
    """Stores that do not answer."""
    fails: Callable[[Work], bool] = lambda _: False
    opens: bool = True
    """The service has a key."""
    ahead: float = 0.0
    """How much the hosts' clocks are."""
    log: list[tuple[float, Work]] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Whatever was in memory is gone."""
        self.taken: dict[tuple[str, str], float] = {}
        self.proved: dict[tuple[str, str], float] = {}
        self.collected: dict[str, float] = {}
        self.troubles: dict[str, Trouble] = {}

    @property
    def scene(self) -> Scene:
        shelves = {
            name: None if name in self.down else dict(held) for name, held in self.stores.items()
        }
        return Scene(
            now=self.now, zone=self.zone, orders=self.orders, shelves=shelves, taken=self.taken,
            proved=self.proved, opens=self.opens, collected=self.collected,
            troubles=self.troubles,
        )  # fmt: skip

    def play(self, seconds: float) -> None:
        """Go on for so long."""
        end = self.now + seconds
        for _ in range(200_000):
            told = agenda(self.scene)
            for one in told.work:
                self.do(one)
            if told.work:
                continue
            # A second at least: that a clock stands still is no scenario.
            soonest = min(told.next or end, self.now + HOUR)
            self.now = max(self.now + 1, soonest)
            if self.now >= end:
                self.now = end
                return
        raise AssertionError("it never rests")

    def do(self, one: Work) -> None:
        self.log.append((self.now, one))
        if self.fails(one):
            self.troubles[one.key] = troubled(self.troubles.get(one.key), self.now, "no")
            return
        self.troubles.pop(one.key, None)
        match one:
            case CreateSnapshot():
                self.made += 1
                self.put(f"s-{self.made}", self.now + self.ahead, one.guest, one.schedule)
                self.taken[one.guest, one.schedule] = self.now
            case CreateGroup():
                self.cut(one)
            case CopySnapshot():
                self.stores[one.target][one.id] = replace(
                    self.stores[one.source][one.id], looked_at={}
                )
            case PruneSnapshots():
                for id_ in one.ids:
                    del self.stores[one.store][id_]
            case VerifySnapshots():
                self.prove(one)
            case CollectGarbage():
                self.collected[one.store] = self.now

    def cut(self, one: CreateGroup) -> None:
        self.made += 1
        for guest, _, _ in one.guests:
            id_ = f"s-{self.made}-{guest}"
            self.put(id_, self.now, guest, one.schedule)
            kept = replace(self.stores["near"][id_].kept, group=f"g-{self.made}")
            self.stores["near"][id_] = Held(kept=kept)
            self.taken[guest, one.schedule] = self.now

    def prove(self, one: VerifySnapshots) -> None:
        for id_ in one.ids:
            held = self.stores[one.store][id_]
            kept = replace(held.kept, good=held.kept.good is not False)
            depth = one.depth if self.opens else Check.SEALED
            self.stores[one.store][id_] = Held(kept=kept, looked_at={str(depth): self.now})
            self.proved[one.store, id_] = self.now

    def put(
        self,
        id_: str,
        at: float,
        guest: str = "w",
        schedule: str | None = "auto",
        in_: str = "near",
    ) -> None:
        kept = Kept(id=id_, guest=guest, made_at=at, schedule=schedule)
        self.stores[in_][id_] = Held(kept=kept)

    def times(self, kind: type, guest: str = "w") -> list[float]:
        return [
            at for at, one in self.log
            if isinstance(one, kind) and (not isinstance(one, CreateSnapshot) or one.guest == guest)
        ]  # fmt: skip

    def local(self, kind: type) -> list[str]:
        return [f"{datetime.fromtimestamp(at, self.zone):%d %H:%M}" for at in self.times(kind)]
