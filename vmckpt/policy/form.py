"""A policy's file: its keys, what each is for, and which values it takes. Pure.

The sentences here are the only place where a key's meaning is written: `vmckpt policy explain`, the
JSON schema that editors use and the test of the documentation read them from here.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator, model_validator

from vmckpt.model.migration import Compression, Mode
from vmckpt.policy import types
from vmckpt.policy.evacuation_form import EvacuateForm
from vmckpt.policy.protection_form import ProtectForm
from vmckpt.policy.schedule_form import ScheduleForm, Text
from vmckpt.policy.schedule_form import Section as _Part
from vmckpt.policy.types import CopyKind, LeftBehind, OnFailure, Tls
from vmckpt.policy.values import (
    WITH_VALUES,
    CompressionWord,
    CopyWord,
    Downtime,
    FailureWord,
    LeftWord,
    ModeWord,
    Part,
    PerCent,
    PlainWord,
    Probe,
    Rate,
    Ratio,
    Recovery,
    Size,
    Time,
    TimeLimit,
    TimeUsedValue,
    TlsWord,
)
from vmckpt.units import Bytes, Seconds, show_bytes

DOWNTIME = Seconds(0.3)
"""Allowed if the file does not say: QEMU's own default."""
CACHE = Bytes(64 << 20)
"""QEMU's own default, too."""

_RETRIES, _STALL = types.Retries(), types.Stall()

Labels = Annotated[dict[str, str], Field(min_length=1)]


class MemoryForm(_Part):
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


class SelectForm(_Part):
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


class LimitsForm(_Part):
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


class RetriesForm(_Part):
    """Attempts after the first, with pauses that grow."""

    times: Annotated[int, Field(ge=0, le=100)] = Field(
        _RETRIES.times, description="Attempts after the first one."
    )
    first_wait: Time = Field(_RETRIES.first_wait, description="Pause before the first of them.")
    factor: Annotated[float, Field(ge=1, le=10, strict=False)] = Field(
        _RETRIES.factor, description="Each pause is this many times the one before."
    )
    longest_wait: Time = Field(_RETRIES.longest_wait, description="No pause is longer.")


class StallForm(_Part):
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


class WhenForm(_Part):
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


class RaiseForm(_Part):
    """How the allowed downtime grows."""

    by: Downtime = Field(description="Longer by that, once in a pass.")
    to: Downtime = Field(description="Until it is that long.")


class ThrottleForm(_Part):
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


class CompressForm(_Part):
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


class DoForm(_Part):
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


class RuleForm(_Part):
    """One rule."""

    name: Text | None = Field(None, description="What reports call it.")
    when: WhenForm = Field(WhenForm(), description="All of it must hold; nothing here: always.")
    do: Annotated[
        Annotated[PlainWord, Tag("(word)")] | Annotated[DoForm, Tag("(values)")],
        Discriminator(_kind_of_do),
    ] = Field(description="What is done then.")


class ConvergeForm(_Part):
    """What is done about a guest that writes faster than the network carries."""

    stall: StallForm = Field(StallForm(), description="What counts as standing still.")
    rules: list[RuleForm] = Field(
        [],
        description="Looked at from the top at each sample; the first that holds and can act does.",
    )


class TransportForm(_Part):
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


class StorageForm(_Part):
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


class ForecastForm(_Part):
    """What is measured before the move."""

    probe: Probe = Field(
        Seconds(1.0), description="How long the guest's writing is measured before the move."
    )


class PolicyForm(_Part):
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
