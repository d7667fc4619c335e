"""The schema of a policy's file: its keys, what each is for, and the values it takes.

The sentences here are the only place where a key's meaning is written: `vmckpt policy explain`, the
JSON schema that editors use and the test of the documentation read them from here.
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
    """A section of a policy's file: only known keys, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class KeepForm(Section):
    """How many snapshots stay; one that any of these keeps stays."""

    last: Count = Field(0, description="The newest so many.")
    hourly: Count = Field(0, description="The newest of each of the last so many hours with one.")
    daily: Count = Field(0, description="The newest of each of the last so many days with one.")
    weekly: Count = Field(0, description="The newest of each of the last so many weeks with one.")
    monthly: Count = Field(0, description="The newest of each of the last so many months with one.")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise ValueError("keeps nothing; write {last: 7}, or take it out: then all stay")
        return self


class CopyForm(Section):
    """Another store that the snapshots are copied to."""

    to: Text = Field(description="A store of the inventory, by name.")
    keep: KeepForm | None = Field(None, description="What stays there; without it, all.")


class VerifyForm(Section):
    """How often snapshots are verified."""

    every: Period = Field(description="That long after the last time.")
    depth: CheckWord = Field(
        Check.SEALED, description="How much is looked at; deep needs the key that opens them."
    )


class ScheduleForm(Section):
    """When snapshots are taken, where they go, and which stay."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = Field(
        description="Small letters, digits, points, dashes; the tag that its snapshots have."
    )
    every: Often = Field(
        None, description="That long after the last one; auto: as often as it pays (Young, Daly)."
    )
    at: Calendar | None = Field(None, description="By the calendar, in the local time zone.")
    one_failure_in: Period | None = Field(
        None, description="For auto: the time between failures, before the journal knows better."
    )
    memory: bool = Field(True, description="With the guest's memory, or its disks alone.")
    group: bool = Field(
        False, description="All guests that have it stop at one moment: a consistent cut."
    )
    store: Text | None = Field(
        None, description="The store they land in; else the first of the inventory."
    )
    keep: KeepForm | None = Field(None, description="What stays in that store; without it, all.")
    copies: Annotated[list[CopyForm], Field(max_length=8)] = Field(
        [], description="Other stores that they are copied to in the background."
    )
    verify: VerifyForm | None = Field(None, description="How often they are verified.")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        given = self.model_fields_set
        if ("every" in given) == ("at" in given):
            raise ValueError("write either every: 15min or at: daily 03:00")
        if self.one_failure_in is not None and not self.automatic:
            raise ValueError("one_failure_in has no effect without every: auto")
        if self.group and not self.memory:
            raise ValueError("a group is captured with its memory; take memory: no out")
        if self.group and self.automatic:
            raise ValueError("auto is reckoned for each guest; give a group a time, like 1h")
        return self

    @property
    def automatic(self) -> bool:
        """Whether it says every: auto."""
        return "every" in self.model_fields_set and self.every is None

    @property
    def failure(self) -> float:
        """See `one_failure_in`."""
        return self.one_failure_in or FAILURE


_EVACUATION = Evacuation()
_Labels = dict[str, str]
_Weight = Annotated[float, Field(ge=-100, le=100, strict=False)]
_Some = Annotated[int, Field(ge=1, le=1000)]


class WeightsForm(Section):
    """What makes one host better than another."""

    spread: _Weight = Field(
        _EVACUATION.spread, description="Equal loads; below 0: few hosts, well filled."
    )
    prefer: _Weight = Field(_EVACUATION.prefer, description="Hosts with labels that are preferred.")
    stay_near: _Weight = Field(
        _EVACUATION.stay_near, description="Hosts that see the same storage as the one before."
    )


class AtOnceForm(Section):
    """How many move at once."""

    source: _Some = Field(_EVACUATION.per_source, description="Away from one host.")
    target: _Some = Field(_EVACUATION.per_target, description="To one host.")
    total: _Some = Field(_EVACUATION.at_once, description="In all.")


class EvacuateForm(Section):
    """How a host is emptied, and what becomes of the guest then."""

    strategy: StrategyWord = Field(
        Strategy.MIGRATE, description="What becomes of a guest; leave: it stays."
    )
    move_shut_off: bool = Field(
        _EVACUATION.move_shut_off, description="A guest that is off is defined on another host."
    )
    priority: Annotated[int, Field(ge=-1000, le=1000)] = Field(
        _EVACUATION.priority, description="Guests with a higher one go first."
    )
    apart: list[str] = Field(
        [], description="Labels; guests with the same value of one never share a host."
    )
    needs: _Labels = Field({}, description="Labels that the new host must have.")
    prefers: _Labels = Field({}, description="Labels that the new host should have.")
    shutdown: Time = Field(
        _EVACUATION.shutdown, description="A guest that is to shut down may take that long."
    )
    order: OrderWord = Field(
        Order.LONGEST, description="Who goes first among those of one priority."
    )
    at_once: AtOnceForm = Field(AtOnceForm(), description="How many move at once.")
    keep_free: Part = Field(
        _EVACUATION.keep_free, description="Of each host's memory, also while guests arrive."
    )
    cpu_overcommit: Annotated[float, Field(gt=0, le=1000, strict=False)] = Field(
        _EVACUATION.cpu_overcommit, description="CPUs of guests for each CPU of a host."
    )
    weights: WeightsForm = Field(
        WeightsForm(), description="What makes one host better than another."
    )
    displace: bool = Field(
        _EVACUATION.displace, description="Guests of other hosts may be moved to make room."
    )
    tries: Annotated[int, Field(ge=1, le=100)] = Field(
        _EVACUATION.tries, description="Attempts for each guest, on other hosts if one fails it."
    )
    first_wait: Time = Field(
        _EVACUATION.first_wait, description="After a guest's first failure; then twice as long."
    )

    def read(self) -> Evacuation:
        """As the rest of the program has it."""
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
    """None: auto."""
    if value == "auto":
        return None
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no time; write it like 100ms, or auto")
    found = parse_seconds(value)
    if not 0.02 <= found <= 10:
        raise ValueError(f"{value}: epochs come 20ms to 10s apart; or write auto")
    return found


def _lease(value: object) -> Seconds:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no time; write it like 1s")
    found = parse_seconds(value)
    if not 1 <= found <= 3600:
        raise ValueError(f"{value}: a lease lasts 1s to 60m")
    return found


_SCHEMA: dict[str, Any] = {"type": "string", "pattern": _TIME, "examples": ["1s", "5s"]}
_AUTO: dict[str, Any] = {
    "anyOf": [{"const": "auto"}, {"type": "string", "pattern": _TIME, "examples": ["100ms"]}]
}


class ProtectForm(Section):
    """How a standby on another host is kept up."""

    interval: Annotated[Seconds | None, BeforeValidator(_interval), WithJsonSchema(_AUTO)] = Field(
        _PROTECTION.interval, description="Between two epochs; auto: by what an epoch costs."
    )
    slowdown: Part = Field(
        _PROTECTION.slowdown, description="For auto: the guest's time that pauses may take at most."
    )
    max_pause: Time = Field(
        _PROTECTION.max_pause, description="A guest whose pauses would be longer is not protected."
    )
    hold: Time = Field(
        _PROTECTION.hold, description="Output waits that long for a backup that is gone."
    )
    failover: FailoverWord = Field(
        Failover.MANUAL,
        description="Who decides that the host is dead; automatic may stop the guest or its host.",
    )
    lease: Annotated[Seconds, BeforeValidator(_lease), WithJsonSchema(_SCHEMA)] = Field(
        _PROTECTION.lease, description="How long a renewal of the lease is good."
    )


DOWNTIME = Seconds(0.3)
"""Allowed if the file does not say: QEMU's own default."""
CACHE = Bytes(64 << 20)
"""QEMU's own default, too."""

_RETRIES, _STALL = model.Retries(), model.Stall()

Labels = Annotated[dict[str, str], Field(min_length=1)]


class MemoryForm(Section):
    """How much memory a guest must have."""

    at_least: Size | None = Field(None, description="Guests with this much memory or more.")
    below: Size | None = Field(None, description="Guests with less memory than this.")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.at_least is None and self.below is None:
            raise ValueError("says nothing; write {at_least: 64GiB}, or below, or take it out")
        if self.at_least is not None and self.below is not None and self.at_least >= self.below:
            raise ValueError("no guest is at_least that large and below that size")
        return self


class SelectForm(Section):
    """Who gets the policy unasked; all that is given must hold."""

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
            raise ValueError("says nothing; write {guests: ['*']} for everybody, or take it out")
        return self


class LimitsForm(Section):
    """What a migration may use."""

    max_downtime: Downtime = Field(
        DOWNTIME, description="Longest pause at the switchover that QEMU may aim for at first."
    )
    bandwidth: Rate = Field(None, description="Most that memory may take of the network.")
    postcopy_bandwidth: Rate = Field(
        None, description="The same from the switch to post-copy on, when the guest waits for it."
    )
    time: TimeLimit = Field(
        None, description="After that long, the migration is given up; the guest stays."
    )
    time_per_gib: TimeLimit = Field(
        None, description="The same for each GiB of the guest's memory; the shorter one counts."
    )


class RetriesForm(Section):
    """Attempts after the first, with pauses that grow."""

    times: Annotated[int, Field(ge=0, le=100)] = Field(
        _RETRIES.times, description="Attempts after the first one."
    )
    first_wait: Time = Field(_RETRIES.first_wait, description="Pause before the first of them.")
    factor: Annotated[float, Field(ge=1, le=10, strict=False)] = Field(
        _RETRIES.factor, description="Each pause is this many times the one before."
    )
    longest_wait: Time = Field(_RETRIES.longest_wait, description="No pause is longer.")


class StallForm(Section):
    """What counts as standing still."""

    window: Time = Field(
        _STALL.window, description="Stalled: what remains had no new low for that long."
    )
    margin: Part = Field(
        _STALL.margin, description="A low that is lower by less than this share is none."
    )
    smoothing: Part = Field(
        _STALL.smoothing, description="Weight of the newest bandwidth in the moving average."
    )
    patience: Time = Field(
        _STALL.patience, description="How long a switch waits for a moment with little to send."
    )


class WhenForm(Section):
    """When a rule acts; all that is given must hold."""

    iteration: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="In this pass over memory or a later one."
    )
    stalled_for: Time | None = Field(None, description="What remains had no new low for that long.")
    dirty_over_bandwidth: Ratio | None = Field(
        None, description="The last pass left at least this share of what it sent dirty again."
    )
    precopy_excess: Ratio | None = Field(
        None,
        description="Ending by pre-copy would send, beyond what a switch to post-copy now would,"
        " this share of what the first pass sent.",
    )
    expected_downtime_above: Time | None = Field(
        None, description="A switchover now would pause the guest for longer."
    )
    expected_downtime_below: Time | None = Field(
        None, description="A switchover now would pause the guest for less."
    )
    time_used: TimeUsedValue | None = Field(
        None, description="That much time, or that share of the time limit, is used."
    )
    remaining_above: Size | None = Field(None, description="More than that is left to send.")
    remaining_below: Size | None = Field(None, description="Less than that is left to send.")


class RaiseForm(Section):
    """How the allowed downtime grows."""

    by: Downtime = Field(description="Longer by that, once in a pass.")
    to: Downtime = Field(description="Until it is that long.")


class ThrottleForm(Section):
    """How much CPU time is taken from a guest that writes too fast."""

    initial: PerCent = Field(20, description="Per cent of CPU time taken from the guest at first.")
    increment: PerCent = Field(10, description="More of it, each time that was not enough.")
    at_most: PerCent = Field(60, description="Never more of it.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.initial > self.at_most:
            raise ValueError(f"initial {self.initial} is more than at_most {self.at_most}")
        return self


_PAGE = 4096


class CompressForm(Section):
    """How differences to pages sent before are kept."""

    cache: Size = Field(CACHE, description="Memory for it on the source, beside the guest's.")

    @field_validator("cache")
    @classmethod
    def _as_qemu_wants(cls, cache: Bytes) -> Bytes:
        """A power of two, of a page at least: QEMU refuses any other, in the middle of a move."""
        if cache >= _PAGE and cache & (cache - 1) == 0:
            return cache
        nearest = max(_PAGE, 1 << (max(1, cache).bit_length() - 1))
        raise ValueError(f"a power of two is needed, such as {show_bytes(Bytes(nearest))}")


class DoForm(Section):
    """An action with values; one of them."""

    raise_downtime: RaiseForm | None = Field(None, description="Allow a longer switchover.")
    auto_converge: ThrottleForm | None = Field(None, description="Slow the guest down.")
    compress: CompressForm | None = Field(
        None, description="Send differences to pages sent before (xbzrle)."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = sum(getattr(self, name) is not None for name in WITH_VALUES)
        if given != 1:
            raise ValueError("a rule does one thing; write one of its actions, or more rules")
        return self


def _kind_of_do(value: Any) -> str:
    return "(values)" if isinstance(value, dict | DoForm) else "(word)"


class RuleForm(Section):
    """One rule."""

    name: Text | None = Field(None, description="What reports call it.")
    when: WhenForm = Field(WhenForm(), description="All of it must hold; nothing here: always.")
    do: Annotated[
        Annotated[PlainWord, Tag("(word)")] | Annotated[DoForm, Tag("(values)")],
        Discriminator(_kind_of_do),
    ] = Field(description="What is done then.")


class ConvergeForm(Section):
    """What is done about a guest that writes faster than the network carries."""

    stall: StallForm = Field(StallForm(), description="What counts as standing still.")
    rules: list[RuleForm] = Field(
        [],
        description="Looked at from the top at each sample; the first that holds and can act does.",
    )


class TransportForm(Section):
    """How memory travels."""

    tls: TlsWord = Field(Tls.PREFERRED, description="Whether memory travels encrypted.")
    connections: Annotated[int, Field(ge=1, le=255)] = Field(
        1, description="TCP connections that memory travels over (QEMU's multifd)."
    )
    zero_copy: bool = Field(False, description="Send pages without copying them first.")
    compression: CompressionWord = Field(
        Compression.NONE, description="How the stream is made smaller from the start."
    )
    compression_level: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="0 to 9, with zstd to 20; more is smaller and slower."
    )


class StorageForm(Section):
    """What becomes of the disks."""

    copy_: CopyWord = Field(
        CopyKind.SHARED, alias="copy", description="What becomes of disks the hosts do not share."
    )
    disks: list[Text] = Field(
        [], description="Only these are copied, like vda; none named: all that are not shared."
    )
    pool: Text | None = Field(
        None, description="Folder or libvirt pool on the target; else the same path as before."
    )
    left_behind: LeftWord = Field(
        LeftBehind.KEEP, description="What becomes of the source's images after the move."
    )


class ForecastForm(Section):
    """What is measured before the move."""

    probe: Probe = Field(
        Seconds(1.0), description="How long the guest's writing is measured before the move."
    )


class PolicyForm(Section):
    """How migrations are to be done."""

    version: Literal["vmckpt/v1"] = Field(description="The form of this file.")
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = Field(
        description="Small letters, digits, points and dashes; what --policy takes."
    )
    description: Annotated[str, Field(max_length=1000)] = Field(
        "", description="One sentence for lists."
    )
    select: SelectForm | None = Field(
        None, description="Who gets it unasked; without it, only who asks for it by name."
    )
    mode: ModeWord = Field(Mode.AUTO, description="How memory gets to the target.")
    limits: LimitsForm = Field(LimitsForm(), description="What a migration may use.")
    retries: RetriesForm = Field(RetriesForm(), description="Attempts after a failed one.")
    converge: ConvergeForm = Field(
        ConvergeForm(), description="What is done about a guest that writes too fast."
    )
    transport: TransportForm = Field(TransportForm(), description="How memory travels.")
    storage: StorageForm = Field(StorageForm(), description="What becomes of the disks.")
    on_failure: FailureWord = Field(
        OnFailure.STOP, description="What follows a failed attempt, when the guest runs as before."
    )
    on_postcopy_broken: Recovery = Field(
        Seconds(600.0), description="A broken post-copy is resumed by itself that long."
    )
    forecast: ForecastForm = Field(ForecastForm(), description="What is measured before.")
    protect: ProtectForm = Field(ProtectForm(), description="How a standby is kept up.")
    evacuate: EvacuateForm = Field(EvacuateForm(), description="How its host is emptied.")
    snapshots: Annotated[list[ScheduleForm], Field(max_length=32)] = Field(
        [], description="Snapshots that vmckpt run takes by itself."
    )


def sentence(key: str) -> str:
    """What a key like "limits.max_downtime" is for. KeyError if there is none such."""
    form: type[BaseModel] = PolicyForm
    told = ""
    for name in key.split("."):
        fields = {field.alias or name: field for name, field in form.model_fields.items()}
        told = fields[name].description or ""
        below = fields[name].annotation
        if isinstance(below, type) and issubclass(below, BaseModel):
            form = below
    return told
