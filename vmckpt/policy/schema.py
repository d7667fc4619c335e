"""The schema of a policy's file: its keys, what each is for, and the values it accepts.

The descriptions here are the only source of a key's meaning: `vmckpt policy explain`, the JSON
schema for editors and the test of the documentation use them.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from vmckpt.model.migration import Compression, Mode
from vmckpt.policy import model
from vmckpt.policy.model import (
    FAILURE,
    Check,
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
from vmckpt.policy.values import (
    WITH_VALUES,
    Calendar,
    CheckWord,
    CompressionWord,
    CopyWord,
    Downtime,
    FailoverWord,
    FailureWord,
    LeftWord,
    ModeWord,
    Often,
    OrderWord,
    Part,
    PerCent,
    Period,
    PlainWord,
    Probe,
    Rate,
    Ratio,
    Recovery,
    Size,
    StrategyWord,
    Time,
    TimeLimit,
    TimeUsedValue,
    TlsWord,
)
from vmckpt.units import Bytes, Seconds, parse_seconds, show_bytes

Text = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=0, le=100_000)]


class Section(BaseModel):
    """A section of a policy's file, which accepts only known keys, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class KeepForm(Section):
    """How many snapshots are kept; a snapshot is kept if any of these rules keeps it."""

    last: Count = Field(0, description="Number of newest snapshots.")
    hourly: Count = Field(
        0, description="Number of hours with snapshots; the newest of each is kept."
    )
    daily: Count = Field(
        0, description="Number of days with snapshots; the newest of each is kept."
    )
    weekly: Count = Field(
        0, description="Number of weeks with snapshots; the newest of each is kept."
    )
    monthly: Count = Field(
        0, description="Number of months with snapshots; the newest of each is kept."
    )

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise ValueError("keeps nothing; write {last: 7}, or leave it out to keep all")
        return self


class CopyForm(Section):
    """Another store that the snapshots are copied to."""

    to: Text = Field(description="A store of the inventory, by name.")
    keep: KeepForm | None = Field(None, description="What is kept there; all by default.")


class VerifyForm(Section):
    """How often snapshots are verified."""

    every: Period = Field(description="Time since the last verification.")
    depth: CheckWord = Field(
        Check.SEALED, description="How thoroughly; deep needs the key that opens the snapshots."
    )


class ScheduleForm(Section):
    """When snapshots are taken, where they are stored, and which are kept."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = Field(
        description="Lower-case letters, digits, dots, underscores, dashes; its snapshots' tag."
    )
    every: Often = Field(
        None, description="Time since the last one; auto: by what snapshots cost (Young, Daly)."
    )
    at: Calendar | None = Field(None, description="By the calendar, in the local time zone.")
    one_failure_in: Period | None = Field(
        None, description="For auto: assumed time between failures, until the journal has data."
    )
    memory: bool = Field(True, description="Whether to include the guest's memory.")
    group: bool = Field(
        False, description="Whether to capture all guests with this schedule at one instant."
    )
    store: Text | None = Field(
        None, description="The store for the snapshots; the inventory's first by default."
    )
    keep: KeepForm | None = Field(None, description="What is kept in that store; all by default.")
    copies: Annotated[list[CopyForm], Field(max_length=8)] = Field(
        [], description="Other stores that the snapshots are copied to in the background."
    )
    verify: VerifyForm | None = Field(None, description="How often the snapshots are verified.")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        given = self.model_fields_set
        if ("every" in given) == ("at" in given):
            raise ValueError("write either every: 15min or at: daily 03:00")
        if self.one_failure_in is not None and not self.automatic:
            raise ValueError("one_failure_in has no effect without every: auto")
        if self.group and not self.memory:
            raise ValueError("a group is captured with its memory; leave out memory: no")
        if self.group and self.automatic:
            raise ValueError("auto is computed for each guest; give a group an interval, like 1h")
        return self

    @property
    def automatic(self) -> bool:
        """Whether the file sets every: auto."""
        return "every" in self.model_fields_set and self.every is None

    @property
    def failure(self) -> float:
        """The value of `one_failure_in` or its default, in seconds."""
        return self.one_failure_in or FAILURE


_EVACUATION = Evacuation()
_Labels = dict[str, str]
_Weight = Annotated[float, Field(ge=-100, le=100, strict=False)]
_Some = Annotated[int, Field(ge=1, le=1000)]


class WeightsForm(Section):
    """Weights of the criteria by which a target host is chosen."""

    spread: _Weight = Field(
        _EVACUATION.spread, description="Equal load on all hosts; below 0: few, well filled hosts."
    )
    prefer: _Weight = Field(_EVACUATION.prefer, description="Hosts with preferred labels.")
    stay_near: _Weight = Field(
        _EVACUATION.stay_near, description="Hosts that see the same storage as the former host."
    )


class AtOnceForm(Section):
    """How many guests move at the same time."""

    source: _Some = Field(_EVACUATION.per_source, description="Guests leaving one host at once.")
    target: _Some = Field(_EVACUATION.per_target, description="Guests going to one host at once.")
    total: _Some = Field(_EVACUATION.at_once, description="Guests moving at once, in total.")


class EvacuateForm(Section):
    """How a host is evacuated, and what is done with the guest then."""

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
        [], description="Labels; guests with the same value of such a label never share a host."
    )
    needs: _Labels = Field({}, description="Labels that the new host must have.")
    prefers: _Labels = Field({}, description="Labels that the new host should have.")
    shutdown: Time = Field(
        _EVACUATION.shutdown, description="How long a guest may take to shut down."
    )
    order: OrderWord = Field(
        Order.LONGEST, description="Which guest goes first among those of equal priority."
    )
    at_once: AtOnceForm = Field(AtOnceForm(), description="How many guests move at the same time.")
    keep_free: Part = Field(
        _EVACUATION.keep_free,
        description="Share of each host's memory to keep free, also while guests arrive.",
    )
    cpu_overcommit: Annotated[float, Field(gt=0, le=1000, strict=False)] = Field(
        _EVACUATION.cpu_overcommit, description="Guest CPUs allowed for each CPU of a host."
    )
    weights: WeightsForm = Field(
        WeightsForm(), description="Weights of the criteria by which a target host is chosen."
    )
    displace: bool = Field(
        _EVACUATION.displace,
        description="Whether guests of other hosts may be moved to make room.",
    )
    tries: Annotated[int, Field(ge=1, le=100)] = Field(
        _EVACUATION.tries, description="Attempts for each guest, on other hosts if one fails."
    )
    first_wait: Time = Field(
        _EVACUATION.first_wait, description="Pause after a guest's first failure, then doubled."
    )

    def read(self) -> Evacuation:
        """Return the section as the rest of vmckpt uses it."""
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
    """Read an interval between epochs; None: auto."""
    if value == "auto":
        return None
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a time; write it like 100ms, or auto")
    found = parse_seconds(value)
    if not 0.02 <= found <= 10:
        raise ValueError(f"{value}: the interval must be 20ms to 10s, or auto")
    return found


def _lease(value: object) -> Seconds:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a time; write it like 1s")
    found = parse_seconds(value)
    if not 1 <= found <= 3600:
        raise ValueError(f"{value}: a lease must last 1s to 60m")
    return found


_SCHEMA: dict[str, Any] = {"type": "string", "pattern": _TIME, "examples": ["1s", "5s"]}
_AUTO: dict[str, Any] = {
    "anyOf": [{"const": "auto"}, {"type": "string", "pattern": _TIME, "examples": ["100ms"]}]
}


class ProtectForm(Section):
    """How a standby on another host is kept synchronised."""

    interval: Annotated[Seconds | None, BeforeValidator(_interval), WithJsonSchema(_AUTO)] = Field(
        _PROTECTION.interval, description="Time between epochs; auto: by what an epoch costs."
    )
    slowdown: Part = Field(
        _PROTECTION.slowdown,
        description="For auto: largest share of time that pauses may take.",
    )
    max_pause: Time = Field(
        _PROTECTION.max_pause, description="A guest whose pauses would be longer is not protected."
    )
    hold: Time = Field(
        _PROTECTION.hold, description="How long output waits for a backup that is gone."
    )
    failover: FailoverWord = Field(
        Failover.MANUAL,
        description="What decides that the host is dead; automatic may stop the guest or its host.",
    )
    lease: Annotated[Seconds, BeforeValidator(_lease), WithJsonSchema(_SCHEMA)] = Field(
        _PROTECTION.lease, description="How long a renewal of the lease is valid."
    )


DOWNTIME = Seconds(0.3)
"""The default of max_downtime, which is QEMU's own."""
CACHE = Bytes(64 << 20)
"""The default of the cache for xbzrle, which is QEMU's own."""

_RETRIES, _STALL = model.Retries(), model.Stall()

Labels = Annotated[dict[str, str], Field(min_length=1)]


class MemoryForm(Section):
    """How much memory a guest must have."""

    at_least: Size | None = Field(None, description="Guests with this much memory or more.")
    below: Size | None = Field(None, description="Guests with less memory than this.")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.at_least is None and self.below is None:
            raise ValueError("is empty; write {at_least: 64GiB}, or below, or leave it out")
        if self.at_least is not None and self.below is not None and self.at_least >= self.below:
            raise ValueError("at_least must be less than below")
        return self


class SelectForm(Section):
    """Which guests get the policy by default; all conditions must hold."""

    guests: Annotated[list[Text], Field(min_length=1)] | None = Field(
        None, description="Globs, one of which must match the guest's name."
    )
    guest_labels: Labels | None = Field(None, description="Labels the guest must have.")
    host_labels: Labels | None = Field(
        None, description="Labels that the host the guest is on must have."
    )
    memory: MemoryForm | None = Field(None, description="How much memory the guest must have.")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("is empty; write {guests: ['*']} for all guests, or leave it out")
        return self


class LimitsForm(Section):
    """Limits of a migration."""

    max_downtime: Downtime = Field(
        DOWNTIME, description="Longest pause at the switchover that QEMU may aim for at first."
    )
    bandwidth: Rate = Field(None, description="Maximum network bandwidth for memory.")
    postcopy_bandwidth: Rate = Field(
        None, description="The same after the switch to post-copy, when the guest waits for it."
    )
    time: TimeLimit = Field(
        None, description="Time after which the migration is cancelled; the guest stays."
    )
    time_per_gib: TimeLimit = Field(
        None, description="The same for each GiB of the guest's memory; the shorter limit applies."
    )


class RetriesForm(Section):
    """Attempts after the first, with growing pauses."""

    times: Annotated[int, Field(ge=0, le=100)] = Field(
        _RETRIES.times, description="Attempts after the first one."
    )
    first_wait: Time = Field(_RETRIES.first_wait, description="Pause before the first retry.")
    factor: Annotated[float, Field(ge=1, le=10, strict=False)] = Field(
        _RETRIES.factor, description="Each pause is this many times the pause before."
    )
    longest_wait: Time = Field(_RETRIES.longest_wait, description="Longest pause.")


class StallForm(Section):
    """What counts as stalled."""

    window: Time = Field(
        _STALL.window, description="Stalled: the remaining memory had no new low for this long."
    )
    margin: Part = Field(
        _STALL.margin, description="A new low must be lower by at least this share."
    )
    smoothing: Part = Field(
        _STALL.smoothing, description="Weight of the newest bandwidth in the moving average."
    )
    patience: Time = Field(
        _STALL.patience, description="How long a switchover waits for a moment with little to send."
    )


class WhenForm(Section):
    """When a rule acts; all conditions must hold."""

    iteration: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="In this pass over memory or a later one."
    )
    stalled_for: Time | None = Field(
        None, description="The remaining memory had no new low for this long."
    )
    dirty_over_bandwidth: Ratio | None = Field(
        None, description="The last pass left at least this share of what it sent dirty again."
    )
    precopy_excess: Ratio | None = Field(
        None,
        description="Finishing by pre-copy would send more than a switch to post-copy now, by this"
        " share of what the first pass sent.",
    )
    expected_downtime_above: Time | None = Field(
        None, description="A switchover now would pause the guest for longer."
    )
    expected_downtime_below: Time | None = Field(
        None, description="A switchover now would pause the guest for less."
    )
    time_used: TimeUsedValue | None = Field(
        None, description="This much time, or this share of the time limit, is used."
    )
    remaining_above: Size | None = Field(None, description="More than this is left to send.")
    remaining_below: Size | None = Field(None, description="Less than this is left to send.")


class RaiseForm(Section):
    """How the allowed downtime grows."""

    by: Downtime = Field(description="The increase, once per pass.")
    to: Downtime = Field(description="The upper limit.")


class ThrottleForm(Section):
    """How much CPU time is taken from a guest that writes too fast."""

    initial: PerCent = Field(20, description="Per cent of CPU time taken from the guest at first.")
    increment: PerCent = Field(10, description="Further per cent, whenever that is not enough.")
    at_most: PerCent = Field(60, description="The upper limit, in per cent.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.initial > self.at_most:
            raise ValueError(f"initial {self.initial} is more than at_most {self.at_most}")
        return self


_PAGE = 4096


class CompressForm(Section):
    """How differences to pages that were sent before are found."""

    cache: Size = Field(CACHE, description="Memory for pages on the source, beside the guest's.")

    @field_validator("cache")
    @classmethod
    def _as_qemu_wants(cls, cache: Bytes) -> Bytes:
        """Require a power of two of at least a page, as QEMU fails in mid-migration otherwise."""
        if cache >= _PAGE and cache & (cache - 1) == 0:
            return cache
        nearest = max(_PAGE, 1 << (max(1, cache).bit_length() - 1))
        raise ValueError(f"must be a power of two, such as {show_bytes(Bytes(nearest))}")


class DoForm(Section):
    """An action with values; exactly one."""

    raise_downtime: RaiseForm | None = Field(None, description="Allow a longer downtime.")
    auto_converge: ThrottleForm | None = Field(None, description="Slow the guest down.")
    compress: CompressForm | None = Field(
        None, description="Send differences to pages sent before (xbzrle)."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = sum(getattr(self, name) is not None for name in WITH_VALUES)
        if given != 1:
            raise ValueError("a rule has one action; write a rule for each action")
        return self


def _kind_of_do(value: Any) -> str:
    return "(values)" if isinstance(value, dict | DoForm) else "(word)"


class RuleForm(Section):
    """A rule: an action, and when it is taken."""

    name: Text | None = Field(None, description="Its name in reports.")
    when: WhenForm = Field(WhenForm(), description="Conditions, which must all hold; none: always.")
    do: Annotated[
        Annotated[PlainWord, Tag("(word)")] | Annotated[DoForm, Tag("(values)")],
        Discriminator(_kind_of_do),
    ] = Field(description="The action.")


class ConvergeForm(Section):
    """What is done about a guest that writes faster than the network can send."""

    stall: StallForm = Field(StallForm(), description="What counts as stalled.")
    rules: list[RuleForm] = Field(
        [],
        description="Checked in order at each sample; the first that holds and can act does.",
    )


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
        None, description="0 to 9, or to 20 with zstd; higher is smaller and slower."
    )


class StorageForm(Section):
    """How the disks are handled."""

    copy_: CopyWord = Field(
        CopyKind.SHARED, alias="copy", description="How disks that are not shared are handled."
    )
    disks: list[Text] = Field(
        [], description="Disks to copy, like vda; by default all that are not shared."
    )
    pool: Text | None = Field(
        None, description="Folder or libvirt pool on the target; by default the same path."
    )
    left_behind: LeftWord = Field(
        LeftBehind.KEEP,
        description="What is done with the source's images after the migration.",
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
        description="Lower-case letters, digits, dots, underscores, dashes; used with --policy."
    )
    description: Annotated[str, Field(max_length=1000)] = Field(
        "", description="One sentence, shown in lists."
    )
    select: SelectForm | None = Field(
        None, description="Which guests get it by default; without it, only on request by name."
    )
    mode: ModeWord = Field(Mode.AUTO, description="How memory gets to the target.")
    limits: LimitsForm = Field(LimitsForm(), description="Limits of a migration.")
    retries: RetriesForm = Field(RetriesForm(), description="Attempts after a failed one.")
    converge: ConvergeForm = Field(
        ConvergeForm(), description="What is done about a guest that writes too fast."
    )
    transport: TransportForm = Field(TransportForm(), description="How memory is transferred.")
    storage: StorageForm = Field(StorageForm(), description="How the disks are handled.")
    on_failure: FailureWord = Field(
        OnFailure.STOP, description="What follows a failed attempt, when the guest runs as before."
    )
    on_postcopy_broken: Recovery = Field(
        Seconds(600.0), description="For how long a broken post-copy is resumed automatically."
    )
    forecast: ForecastForm = Field(ForecastForm(), description="What is measured before.")
    protect: ProtectForm = Field(ProtectForm(), description="How a standby is synchronised.")
    evacuate: EvacuateForm = Field(EvacuateForm(), description="How its host is evacuated.")
    snapshots: Annotated[list[ScheduleForm], Field(max_length=32)] = Field(
        [], description="Snapshots that vmckpt run takes."
    )


def sentence(key: str) -> str:
    """Return what a key like "limits.max_downtime" is for. Raises KeyError: no such key."""
    form: type[BaseModel] = PolicyForm
    told = ""
    for name in key.split("."):
        fields = {field.alias or name: field for name, field in form.model_fields.items()}
        told = fields[name].description or ""
        below = fields[name].annotation
        if isinstance(below, type) and issubclass(below, BaseModel):
            form = below
    return told
