"""The schema of policy files: the keys, their purposes, and the values they accept.

The descriptions here are the only source of a key's meaning: `vmckpt policy explain`, the JSON
schema for editors and the test of the documentation use them.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from vmckpt.model.migration import Compression, Mode
from vmckpt.policy import model
from vmckpt.policy.converge_schema import ConvergeForm
from vmckpt.policy.model import (
    CopyKind,
    Evacuation,
    Failover,
    LeftBehind,
    OnFailure,
    Order,
    Protection,
    Strategy,
    Tls,
)
from vmckpt.policy.schedule_schema import ScheduleForm
from vmckpt.policy.section import Section, Text
from vmckpt.policy.values import (
    CompressionWord,
    CopyWord,
    Downtime,
    FailoverWord,
    FailureWord,
    LeftWord,
    ModeWord,
    OrderWord,
    Part,
    Probe,
    Rate,
    Recovery,
    Size,
    StrategyWord,
    Time,
    TimeLimit,
    TlsWord,
)
from vmckpt.units import Seconds, parse_seconds

_EVACUATION = Evacuation()
_Labels = dict[str, str]
_Weight = Annotated[float, Field(ge=-100, le=100)]
_Some = Annotated[int, Field(ge=1, le=1000)]


class WeightsForm(Section):
    """Weights of the criteria by which a target host is chosen."""

    spread: _Weight = Field(
        _EVACUATION.spread, description="Even load on all hosts; below 0: pack guests on few hosts."
    )
    prefer: _Weight = Field(_EVACUATION.prefer, description="Hosts with preferred labels.")
    stay_near: _Weight = Field(
        _EVACUATION.stay_near, description="Hosts with access to the same storage as the source."
    )


class AtOnceForm(Section):
    """How many guests move at the same time."""

    source: _Some = Field(_EVACUATION.per_source, description="Concurrent moves off one host.")
    target: _Some = Field(_EVACUATION.per_target, description="Concurrent moves to one host.")
    total: _Some = Field(_EVACUATION.at_once, description="Concurrent moves in total.")


class EvacuateForm(Section):
    """How a host is evacuated, and what is done with its guests."""

    strategy: StrategyWord = Field(
        Strategy.MIGRATE, description="What is done with the guest; leave: it stays on the host."
    )
    move_shut_off: bool = Field(
        _EVACUATION.move_shut_off, description="Whether to move guests that are shut off."
    )
    priority: Annotated[int, Field(ge=-1000, le=1000)] = Field(
        _EVACUATION.priority, description="Guests with a higher priority go first."
    )
    apart: list[str] = Field(
        [], description="Guests with the same value for any of these labels never share a host."
    )
    needs: _Labels = Field({}, description="Labels that the new host must have.")
    prefers: _Labels = Field({}, description="Labels that the new host should have.")
    shutdown: Time = Field(
        _EVACUATION.shutdown, description="How long a guest may take to shut down."
    )
    order: OrderWord = Field(
        Order.LONGEST, description="Which guest moves first among guests of equal priority."
    )
    at_once: AtOnceForm = Field(AtOnceForm(), description="How many guests move at the same time.")
    keep_free: Part = Field(
        _EVACUATION.keep_free,
        description="Share of each host's memory to keep free, even while guests arrive.",
    )
    cpu_overcommit: Annotated[float, Field(gt=0, le=1000)] = Field(
        _EVACUATION.cpu_overcommit, description="Virtual CPUs allowed per CPU of a host."
    )
    weights: WeightsForm = Field(
        WeightsForm(), description="Weights of the criteria by which a target host is chosen."
    )
    displace: bool = Field(
        _EVACUATION.displace,
        description="Whether guests of other hosts may be moved to make room.",
    )
    tries: Annotated[int, Field(ge=1, le=100)] = Field(
        _EVACUATION.tries, description="Attempts per guest, on another host if the target failed."
    )
    first_wait: Time = Field(
        _EVACUATION.first_wait, description="Pause before a guest's first retry; doubles each time."
    )

    def read(self) -> Evacuation:
        """Return the section as an Evacuation."""
        return Evacuation(
            strategy=self.strategy, move_shut_off=self.move_shut_off,
            priority=self.priority, apart=tuple(self.apart),
            needs=tuple(sorted(self.needs.items())), prefers=tuple(sorted(self.prefers.items())),
            shutdown=self.shutdown, order=self.order, per_source=self.at_once.source,
            per_target=self.at_once.target, at_once=self.at_once.total, keep_free=self.keep_free,
            cpu_overcommit=self.cpu_overcommit, spread=self.weights.spread,
            prefer=self.weights.prefer, stay_near=self.weights.stay_near, displace=self.displace,
            tries=self.tries, first_wait=self.first_wait,
        )  # fmt: skip


_PROTECTION = Protection()
_TIME = r"^[0-9]+(\.[0-9]+)?(ms|s|m)$"


def _interval(value: object) -> Seconds | None:
    """Parse the interval between epochs. Returns None for auto. Raises ValueError."""
    if value == "auto":
        return None
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a time; use a value like 100ms, or auto")
    found = parse_seconds(value)
    if not 0.02 <= found <= 10:
        raise ValueError(f"{value}: the interval must be between 20ms and 10s, or auto")
    return found


def _lease(value: object) -> Seconds:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a time; use a value like 1s")
    found = parse_seconds(value)
    if not 1 <= found <= 3600:
        raise ValueError(f"{value}: a lease must last between 1s and 60m")
    return found


_SCHEMA: dict[str, Any] = {"type": "string", "pattern": _TIME, "examples": ["1s", "5s"]}
_AUTO: dict[str, Any] = {
    "anyOf": [{"const": "auto"}, {"type": "string", "pattern": _TIME, "examples": ["100ms"]}]
}


class ProtectForm(Section):
    """How a guest is protected by a standby on another host."""

    interval: Annotated[Seconds | None, BeforeValidator(_interval), WithJsonSchema(_AUTO)] = Field(
        _PROTECTION.interval, description="Epoch interval; auto: derived from the cost of an epoch."
    )
    slowdown: Part = Field(
        _PROTECTION.slowdown,
        description="For auto: maximum share of time for which the guest may be paused.",
    )
    max_pause: Time = Field(
        _PROTECTION.max_pause,
        description="Maximum pause per epoch; a guest with longer pauses is not protected.",
    )
    hold: Time = Field(
        _PROTECTION.hold,
        description="Time from losing the backup until permission to run unprotected is requested.",
    )
    failover: FailoverWord = Field(
        Failover.MANUAL,
        description="What decides that the host is dead; automatic may stop the guest or its host.",
    )
    lease: Annotated[Seconds, BeforeValidator(_lease), WithJsonSchema(_SCHEMA)] = Field(
        _PROTECTION.lease, description="How long a renewal of the lease is valid."
    )


DOWNTIME = Seconds(0.3)
"""The default of max_downtime, the same as QEMU's."""

_RETRIES = model.Retries()

Labels = Annotated[dict[str, str], Field(min_length=1)]


class MemoryForm(Section):
    """How much memory a guest must have."""

    at_least: Size | None = Field(None, description="Guests with this much memory or more.")
    below: Size | None = Field(None, description="Guests with less memory than this.")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.at_least is None and self.below is None:
            raise ValueError("is empty; write {at_least: 64GiB} or {below: 64GiB}, or remove it")
        if self.at_least is not None and self.below is not None and self.at_least >= self.below:
            raise ValueError("at_least must be less than below")
        return self


class SelectForm(Section):
    """Which guests use the policy by default; all conditions must hold."""

    guests: Annotated[list[Text], Field(min_length=1)] | None = Field(
        None, description="Globs; at least one must match the guest's name."
    )
    guest_labels: Labels | None = Field(None, description="Labels the guest must have.")
    host_labels: Labels | None = Field(None, description="Labels that the guest's host must have.")
    memory: MemoryForm | None = Field(None, description="How much memory the guest must have.")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("is empty; write {guests: ['*']} for all guests, or remove select")
        return self


class LimitsForm(Section):
    """Limits of a migration."""

    max_downtime: Downtime = Field(
        DOWNTIME, description="Initial limit for the guest's pause at the switchover."
    )
    bandwidth: Rate = Field(None, description="Maximum network bandwidth for memory.")
    postcopy_bandwidth: Rate = Field(
        None, description="Maximum bandwidth in post-copy, while the guest waits for its memory."
    )
    time: TimeLimit = Field(
        None, description="Time limit; when it expires, the migration is cancelled."
    )
    time_per_gib: TimeLimit = Field(
        None, description="Time limit per GiB of guest memory; the shorter limit applies."
    )


class RetriesForm(Section):
    """Attempts after the first, with growing pauses."""

    times: Annotated[int, Field(ge=0, le=100)] = Field(
        _RETRIES.times, description="Attempts after the first one."
    )
    first_wait: Time = Field(_RETRIES.first_wait, description="Pause before the first retry.")
    factor: Annotated[float, Field(ge=1, le=10)] = Field(
        _RETRIES.factor, description="Factor by which each pause is longer than the previous pause."
    )
    longest_wait: Time = Field(_RETRIES.longest_wait, description="Longest pause.")


class TransportForm(Section):
    """How memory is transferred."""

    tls: TlsWord = Field(Tls.PREFERRED, description="Whether memory is encrypted in transit.")
    connections: Annotated[int, Field(ge=1, le=255)] = Field(
        1, description="TCP connections for memory (QEMU's multifd)."
    )
    zero_copy: bool = Field(False, description="Send pages without copying them first.")
    compression: CompressionWord = Field(
        Compression.NONE, description="How the stream is compressed from the start."
    )
    compression_level: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="0 to 9, with zstd 0 to 20; higher levels are slower and compress more."
    )


class StorageForm(Section):
    """How the disks are handled."""

    copy_: CopyWord = Field(
        CopyKind.SHARED, alias="copy", description="How disks that are not shared are handled."
    )
    disks: list[Text] = Field(
        [], description="Disks to copy, such as vda; by default all disks that are not shared."
    )
    pool: Text | None = Field(
        None, description="Directory or libvirt pool on the target; by default the same path."
    )
    left_behind: LeftWord = Field(
        LeftBehind.KEEP,
        description="What is done with the images on the source after the migration.",
    )


class ForecastForm(Section):
    """What is measured before the migration."""

    probe: Probe = Field(
        Seconds(1.0),
        description="How long the guest's dirty rate is measured before the migration.",
    )


class PolicyForm(Section):
    """How guests are migrated, protected, evacuated and snapshotted."""

    version: Literal["vmckpt/v1"] = Field(description="The format of this file.")
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = Field(
        description="Name for --policy: lower-case letters, digits, dots, underscores, dashes."
    )
    description: Annotated[str, Field(max_length=1000)] = Field(
        "", description="One sentence, shown in lists."
    )
    select: SelectForm | None = Field(
        None, description="Guests with this policy by default; if absent, only --policy selects it."
    )
    mode: ModeWord = Field(Mode.AUTO, description="How memory is transferred to the target.")
    limits: LimitsForm = Field(LimitsForm(), description="Limits of a migration.")
    retries: RetriesForm = Field(RetriesForm(), description="Retries after a failed attempt.")
    converge: ConvergeForm = Field(
        ConvergeForm(), description="What is done about a guest that writes too fast."
    )
    transport: TransportForm = Field(TransportForm(), description="How memory is transferred.")
    storage: StorageForm = Field(StorageForm(), description="How the disks are handled.")
    on_failure: FailureWord = Field(
        OnFailure.STOP, description="What to do after a failed attempt; the guest keeps running."
    )
    on_postcopy_broken: Recovery = Field(
        Seconds(600.0), description="How long to try to resume a broken post-copy automatically."
    )
    forecast: ForecastForm = Field(ForecastForm(), description="Measurements before the migration.")
    protect: ProtectForm = Field(
        ProtectForm(),
        description="Settings of a protection: epochs, buffered output, failover and lease.",
    )
    evacuate: EvacuateForm = Field(EvacuateForm(), description="How the guest's host is evacuated.")
    snapshots: Annotated[list[ScheduleForm], Field(max_length=32)] = Field(
        [], description="Schedules of the snapshots that vmckpt run takes."
    )


def sentence(key: str) -> str:
    """Return the description of a key such as "limits.max_downtime". Raises KeyError."""
    form: type[BaseModel] = PolicyForm
    told = ""
    for name in key.split("."):
        fields = {field.alias or name: field for name, field in form.model_fields.items()}
        told = fields[name].description or ""
        below = fields[name].annotation
        if isinstance(below, type) and issubclass(below, BaseModel):
            form = below
    return told
