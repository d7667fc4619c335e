"""Replay a recorded migration in the dashboard, in real time."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vmckpt.errors import BadInput
from vmckpt.journal import queries
from vmckpt.journal.jobs import JobDetail, JobView, News
from vmckpt.journal.records import StoredEvent, StoredSample
from vmckpt.journal.serialization import as_record, plain
from vmckpt.migration import report
from vmckpt.migration import trace as traces
from vmckpt.migration.run.progress import ProgressTracker
from vmckpt.model.events import Begun, Decided, Event, PhaseChanged, Said, Sampled
from vmckpt.model.guest import FleetNow, GuestNow, GuestState, HostNow, SnapshotNow
from vmckpt.model.migration import JobPhase, Outcome
from vmckpt.policy.model import Stall
from vmckpt.simulation.fleet import operation, over
from vmckpt.simulation.source import at_once
from vmckpt.units import Bytes, Seconds

_SOURCE, _TARGET = "source", "target"
_JOB = "m-trace"
_UUID = "00000000-0000-4000-a000-000000000000"
_MAX_DOWNTIME = 300.0
"""Downtime limit, in milliseconds, that is assumed until a decision in the trace contains one."""
_ROOM = 4
"""A host's memory, as a multiple of the guest's; a trace has no data on hosts."""
_ORIGIN = Seconds(0.0)
_NOT_HERE = "not available in a replay"


class Replayed:
    """A data source with a single job: the replay of a trace, which begins now.

    The constructor raises BadInput if the file is not a trace.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._trace = traces.read(path)
        self.title = f"a replay of {path.name}"
        self._clock, self._began = clock, clock()
        self._lasts = self._trace.samples[-1].at
        self._decisions = list(self._trace.decisions)
        self._progress = ProgressTracker(self._trace.header.curve, Stall())
        self._progress.join(_ORIGIN)  # the passes of a trace are already numbered
        self._max_downtime = _MAX_DOWNTIME
        self._read = 0
        self._phase: JobPhase | None = None
        self._samples: list[Sampled] = []
        self._events: list[tuple[float, Event]] = []
        self._ended: JobView | None = None

    async def close(self) -> None:
        pass

    async def fleet(self) -> FleetNow:
        header, passed = self._trace.header, self._played()
        guest = GuestNow(
            name=header.guest, uuid=_UUID, host=_SOURCE, state=GuestState.RUNNING,
            memory=header.memory, vcpus=0,
        )  # fmt: skip
        other = replace(guest, state=GuestState.PAUSED)
        guests: tuple[GuestNow, ...]
        if passed >= self._lasts:
            good = self._outcome is Outcome.COMPLETED
            guests = (replace(guest, host=_TARGET if good else _SOURCE),)
        elif self._phase is JobPhase.POST_COPY:
            guests = (other, replace(guest, host=_TARGET))
        else:
            guests = (guest, replace(other, host=_TARGET))
        size = Bytes(_ROOM * header.memory)
        hosts = tuple(
            HostNow(name=name, memory=size, free=Bytes(size - header.memory))
            for name in (_SOURCE, _TARGET)
        )
        return FleetNow(at=self._clock(), hosts=hosts, guests=guests)

    async def jobs(self, ended: int) -> Sequence[JobView]:
        view = self._view()
        return (view,) if view.operation.active or ended else ()

    async def job(self, id_: str) -> JobDetail:
        news = await self.news(id_, 0, 0)
        return JobDetail(
            view=news.view, forecast=None, events=news.events, samples=news.samples, requests=()
        )

    async def news(self, id_: str, event: int, sample: int) -> News:
        if id_ not in (_JOB, self._trace.header.guest):
            raise queries.unknown(id_, [_JOB])
        return News(view=self._view(), events=self._told(event), samples=self._sampled(sample))

    async def parts(self, id_: str) -> Sequence[JobView]:
        del id_
        return ()

    async def protections(self) -> Mapping[str, Mapping[str, Any]]:
        return {}

    async def snapshots(self) -> Sequence[SnapshotNow]:
        return ()

    async def ask(self, words: Sequence[str], width: int) -> Said:
        """Refuse a command; see model.events.Commands."""
        del words, width
        return Said(text=f"{_NOT_HERE}\n", code=BadInput.exit_code)

    def start(self, words: Sequence[str], width: int) -> Begun:
        """Refuse a command; see model.events.Commands."""
        del width
        return at_once(tuple(words), _NOT_HERE, BadInput.exit_code)

    @property
    def _outcome(self) -> Outcome:
        """The recorded outcome; unknown if the trace is incomplete."""
        told = self._trace.outcome
        return Outcome(told) if told is not None and told in {*Outcome} else Outcome.UNKNOWN

    def _played(self) -> float:
        """Read the trace up to the current time. Returns the seconds since the replay began."""
        passed, samples = self._clock() - self._began, self._trace.samples
        while self._read < len(samples) and samples[self._read].at <= passed:
            raw = samples[self._read]
            self._decide(raw.at)
            self._read += 1
            if (sample := self._progress.take(raw)) is None:
                continue
            if sample.phase is not self._phase:
                self._phase = sample.phase
                self._events.append((sample.at, PhaseChanged(phase=sample.phase)))
            self._progress.tell(sample, Seconds(self._max_downtime / 1000), self._keep)
        if passed >= self._lasts:
            self._decide(float("inf"))
        return passed

    def _keep(self, event: Event) -> None:
        if isinstance(event, Sampled):
            self._samples.append(event)

    def _decide(self, until: float) -> None:
        while self._decisions and self._decisions[0].at <= until:
            one = self._decisions.pop(0)
            limit = one.numbers.get("max_downtime_ms")
            if isinstance(limit, int | float):
                self._max_downtime = float(limit)
            at = min(max(0.0, one.at), self._lasts)
            self._events.append((at, Decided(decision=one)))

    def _told(self, after: int) -> list[StoredEvent]:
        stored = [as_record(event, _ORIGIN, Seconds(at)) for at, event in self._events[after:]]
        return [
            StoredEvent(seq=number, at=one.at, kind=one.kind, values=one.values)
            for number, one in enumerate(stored, after + 1)
        ]

    def _sampled(self, after: int) -> list[StoredSample]:
        stored = [as_record(one, _ORIGIN, one.sample.at) for one in self._samples[after:]]
        return [
            StoredSample(seq=number, at=one.at, values=one.values)
            for number, one in enumerate(stored, after + 1)
        ]

    def _view(self) -> JobView:
        passed, header = self._played(), self._trace.header
        one = operation(
            _JOB, "migrate", header.guest, self._began, guest_uuid=_UUID, source=_SOURCE,
            target=_TARGET, policy=header.policy, mode=str(header.mode),
            phase=str(self._phase or JobPhase.SETUP),
        )  # fmt: skip
        if passed >= self._lasts:
            if self._ended is None:
                ended_at = self._began + self._lasts
                self._ended = over(one, self._outcome, ended_at, self._report())
            return self._ended
        last = self._sampled(max(0, len(self._samples) - 1))
        return JobView(operation=one, attended=True, sample=last[0] if last else None)

    def _report(self) -> dict[str, Any]:
        """Return the report as JSON, with the data that the trace contains."""
        header, trace = self._trace.header, self._trace
        switched = [one.at for one in trace.samples if one.phase is JobPhase.POST_COPY]
        told = report.MigrationReport(
            guest=header.guest, source=_SOURCE, target=_TARGET, job=_JOB, outcome=self._outcome,
            driver=None, began=_ORIGIN, elapsed=Seconds(self._lasts), totals=None,
            observed_downtime=None, samples=trace.samples, decisions=trace.decisions,
            policy=header.policy, mode=header.mode, switched=switched[0] if switched else None,
        )  # fmt: skip
        return {k: v for k, v in plain(report.as_json(told)).items() if k != "samples"}
