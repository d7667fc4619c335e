"""A source that stands still, and commands that are only written down."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vmckpt.journal.evacuation_progress import MOVE as BY_STEP
from vmckpt.journal.jobs import JobDetail, JobView, News
from vmckpt.journal.records import (
    ControllerIdentity,
    Operation,
    StepState,
    StoredEvent,
    StoredForecast,
    StoredSample,
    StoredStep,
)
from vmckpt.model.events import Begun, Said
from vmckpt.model.guest import FleetNow, GuestNow, GuestState, HostNow, SnapshotNow
from vmckpt.units import GIB, MIB, Bytes, Seconds

NOW = 1_800_000_000.0


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012}"


def guest(number: int, name: str, host: str, **more: Any) -> GuestNow:
    told: dict[str, Any] = {
        "state": GuestState.RUNNING, "memory": Bytes(4 * GIB), "vcpus": 2, **more,
    }  # fmt: skip
    return GuestNow(name=name, uuid=uuid(number), host=host, **told)


def host(name: str, free: int, **more: Any) -> HostNow:
    return HostNow(name=name, cpus=16, memory=Bytes(64 * GIB), free=Bytes(free * GIB), **more)


FLEET = FleetNow(
    at=NOW,
    hosts=(
        host("alpha", 20), host("beta", 50), host("gamma", 60),
        host("delta", 64, closed="it is in maintenance (m-1, eva: new memory)"),
        HostNow(name="omega", error="omega: no answer within 6 s"),
    ),
    guests=(
        guest(1, "web1", "alpha", labels={"tier": "web"}),
        guest(2, "web2", "alpha"),
        guest(3, "db1", "beta"),
        guest(4, "old", "alpha", state=GuestState.SHUT_OFF),
        guest(5, "busy", "beta"),
        guest(6, "safe", "alpha"),
    ),
)  # fmt: skip


def operation(id_: str, kind: str = "migrate", **more: Any) -> Operation:
    told: dict[str, Any] = {
        "guest": "busy", "guest_uuid": uuid(5), "source": "beta", "target": "gamma",
        "policy": "balanced", "mode": "hybrid", "state": "running", "phase": "pre-copy",
        "outcome": None, "asked_by": "eva@desk", "asked_from": None,
        "controller": ControllerIdentity(host="desk", boot="b", pid=77, started=1),
        "began_at": NOW - 20, "ended_at": None, "detail": {}, "report": None, **more,
    }  # fmt: skip
    return Operation(id=id_, kind=kind, **told)


def sample(seq: int, at: float, **more: Any) -> StoredSample:
    left = max(0.0, 4096 - 150 * at)
    told = {
        "phase": "pre-copy", "iteration": 1 + int(at // 8), "remaining": int(left * MIB),
        "total": 4096 * MIB, "transferred": int(200 * MIB * at), "bandwidth": 200 * MIB,
        "dirty_rate": None if at < 8 else 50 * MIB, "expected_downtime_ms": 340.0, "throttle": 0,
        "done": min(1.0, at / 27), "left_low_ms": 4000.0, "left_high_ms": 9000.0,
        "converging": True, **more,
    }  # fmt: skip
    return StoredSample(seq=seq, at=Seconds(at), values=told)


SAMPLES = tuple(sample(number, number / 2) for number in range(1, 40))
EVENTS = (
    StoredEvent(seq=1, at=Seconds(0.1), kind="phase-changed", values={"phase": "setup"}),
    StoredEvent(seq=2, at=Seconds(0.5), kind="phase-changed", values={"phase": "pre-copy"}),
    StoredEvent(seq=3, at=Seconds(9.0), kind="decided", values={
        "action": "raise the longest downtime to 400 ms", "acted": True, "rule": "grow",
        "reason": "the last passes got no smaller", "numbers": {"remaining_mib": 900},
    }),
)  # fmt: skip
FORECAST = StoredForecast(made_at=NOW - 21, values={
    "expected": {"total_ms": [18_000, 29_000], "downtime_ms": [120, 400]},
    "max_downtime_ms": 300.0,
})  # fmt: skip
MOVE = JobView(operation=operation("m-7k3f"), attended=True, sample=SAMPLES[-1])
BROKEN = JobView(
    operation=operation("m-brok", guest="torn", guest_uuid=uuid(9), phase="postcopy-paused"),
    attended=False, sample=SAMPLES[3],
)  # fmt: skip
DRAIN = JobView(
    operation=operation(
        "e-4b7x", "evacuate", guest="alpha", guest_uuid=None, source="alpha", target=None,
        phase="moving", policy="maintenance",
        detail={"expected_ms": [30_000, 90_000], "left": [], "moves": [
            {"guest": "web1", "from": "alpha", "to": "gamma", "begins_ms": 0, "ends_ms": 9000},
            {"guest": "web2", "from": "alpha", "to": "beta", "begins_ms": 9000, "ends_ms": 18000},
        ]},
    ),
    attended=True, sample=None,
)  # fmt: skip
PART = JobView(
    operation=operation("m-part", guest="web1", guest_uuid=uuid(1), source="alpha"), attended=True,
    sample=SAMPLES[20],
)  # fmt: skip
ENDED = JobView(
    operation=operation(
        "m-done", guest="db1", guest_uuid=uuid(3), state="ended", phase="done",
        outcome="completed", ended_at=NOW - 4000, began_at=NOW - 4100,
        report={"total_ms": 41_000, "downtime_ms": 120},
    ),
    attended=None, sample=None,
)  # fmt: skip
PROTECT = JobView(
    operation=operation(
        "p-9abc", "protect", guest="safe", guest_uuid=uuid(6), source="alpha", target="beta",
        phase="protecting", controller=ControllerIdentity(host="alpha", boot="", pid=1, started=1),
    ),
    attended=True, sample=None,
)  # fmt: skip


def entry(**more: Any) -> dict[str, Any]:
    """A protection as its agents tell it."""
    ours = {
        "role": "primary", "phase": "protecting", "epoch": 8123, "rpo_s": 0.11,
        "rpo_worst_s": 0.4, "interval_s": 0.1, "interval_why": "as asked", "output_delay_s": 0.07,
        "output_delay_worst_s": 0.3, "pause_p99_s": 0.031, "packets_lost": 0,
        "median": {"pause_s": 0.012, "pause_stop_s": 0.002, "pause_state_s": 0.004,
                   "pause_changed_pages_s": 0.006, "bytes": 900_000, "pages": 220.0},
        "standby": {"ready": True}, **more,
    }  # fmt: skip
    theirs = {"role": "backup", "ready": True, "says": "it has epoch 8123", "runs": True}
    return {
        "guest": "safe", "uuid": uuid(6), "job": "p-9abc", "primary": "alpha", "backup": "beta",
        "automatic": True, "standby": {"ready": True, "why": "it has epoch 8123"},
        "says": {"alpha": ours, "beta": theirs},
    }  # fmt: skip


def snapshot(id_: str, number: int, name: str, **more: Any) -> SnapshotNow:
    told: dict[str, Any] = {
        "guest": f"web{number}", "guest_uuid": uuid(number), "made_at": NOW - 5000,
        "memory": Bytes(4 * GIB), "disks": Bytes(20 * GIB), "new": Bytes(300 * MIB), **more,
    }  # fmt: skip
    return SnapshotNow(id=id_, name=name, store="main", **told)


SNAPSHOTS = (
    snapshot(
        "s-aaa", 1, "monday", schedule="nightly", verified="good (deep)", verified_at=NOW - 10_800
    ),
    snapshot("s-bbb", 1, "tuesday", parent="s-aaa", made_at=NOW - 900, schedule="nightly"),
    snapshot(
        "s-ccc",
        2,
        "before-upgrade",
        pinned=True,
        damaged=True,
        verified="bad (deep)",
        verified_at=NOW - 3600,
    ),
    snapshot("s-ddd", 2, "cut", made_at=NOW - 10, group="g-uq6nkk3ydjr4zqhe"),
)


@dataclass
class _Begun:
    words: tuple[str, ...]
    pid: int
    ends: Said | None
    stopped: bool = False

    def said(self) -> Said:
        return self.ends or Said(text="under way", code=130 if self.stopped else None)

    def stop(self) -> None:
        self.stopped = True


@dataclass
class Still:
    """See the module."""

    title: str = ""
    fleet_now: FleetNow = FLEET
    views: Sequence[JobView] = (MOVE, BROKEN, DRAIN, PROTECT, ENDED)
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"p-9abc": entry()})
    kept: Sequence[SnapshotNow] = SNAPSHOTS
    answers: Mapping[str, Said] = field(default_factory=dict)
    """By a command's first word."""
    ends: Said | None = field(default_factory=lambda: Said(text="all well", code=0))
    """What is begun; None: it does not end."""
    asked: list[tuple[str, ...]] = field(default_factory=list)
    begun: list[_Begun] = field(default_factory=list)
    trouble: Exception | None = None
    """What every call raises."""

    async def fleet(self) -> FleetNow:
        self._fail()
        return self.fleet_now

    async def jobs(self, ended: int) -> Sequence[JobView]:
        self._fail()
        return self.views

    async def job(self, id_: str) -> JobDetail:
        self._fail()
        found = next(one for one in (*self.views, PART) if one.operation.id == id_)
        moves = found.operation.kind == "migrate"
        return JobDetail(
            view=found, forecast=FORECAST if moves else None, events=EVENTS, steps=(), requests=(),
            samples=SAMPLES if moves else (),
        )  # fmt: skip

    async def news(self, id_: str, event: int, sample: int) -> News:
        found = await self.job(id_)
        return News(
            view=found.view, events=[one for one in found.events if one.seq > event],
            samples=[one for one in found.samples if one.seq > sample],
        )  # fmt: skip

    async def parts(self, id_: str) -> Sequence[JobView]:
        self._fail()
        return (PART,)

    async def protections(self) -> Mapping[str, Mapping[str, Any]]:
        self._fail()
        return self.entries

    async def snapshots(self) -> Sequence[SnapshotNow]:
        self._fail()
        return self.kept

    async def close(self) -> None:
        pass

    async def ask(self, words: Sequence[str], width: int) -> Said:
        self.asked.append(tuple(words))
        return self.answers.get(words[0], Said(text=f"answer to {' '.join(words)}", code=0))

    def start(self, words: Sequence[str], width: int) -> Begun:
        self.begun.append(_Begun(tuple(words), 1000 + len(self.begun), self.ends))
        return self.begun[-1]

    def _fail(self) -> None:
        if self.trouble is not None:
            raise self.trouble


def step(state: StepState, target: str, at: float) -> StoredStep:
    """A move of web2 that is no job of its own."""
    intent = {"guest": "web2", "uuid": "u-2", "from": "alpha", "to": target}
    return StoredStep(seq=round(at), name=BY_STEP, intent=intent, state=state, result=None,
                      began_at=NOW + at, ended_at=None)  # fmt: skip
