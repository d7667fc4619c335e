"""The schema of the section `converge` of policy files: rules, their conditions and actions."""

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from vmckpt.policy.model import Stall, SwitchCost
from vmckpt.policy.section import Section, Text
from vmckpt.policy.values import (
    WITH_VALUES,
    Downtime,
    Part,
    PerCent,
    PlainWord,
    Ratio,
    Size,
    Time,
    TimeUsedValue,
)
from vmckpt.units import Bytes, show_bytes

_STALL, _COST = Stall(), SwitchCost()
CACHE = Bytes(64 << 20)
"""The default size of the xbzrle cache, the same as QEMU's."""


Weight = Annotated[float, Field(ge=0, le=100)]


class StallForm(Section):
    """When a migration counts as stalled."""

    window: Time = Field(
        _STALL.window,
        description="Stalled if the remaining memory has not reached a new low for this long.",
    )
    margin: Part = Field(
        _STALL.margin, description="A new low must be below the last low by at least this share."
    )
    smoothing: Part = Field(
        _STALL.smoothing, description="Weight of the newest sample in the average bandwidth."
    )
    patience: Time = Field(
        _STALL.patience, description="How long a switchover waits for a moment with little to send."
    )


class CostForm(Section):
    """Weights of the times whose sum decides when to switch to post-copy."""

    total_time: Weight = Field(
        _COST.total_time, description="Weight of the time until the migration ends."
    )
    postcopy_time: Weight = Field(
        _COST.postcopy_time,
        description="Weight of the time in post-copy, when the guest depends on both hosts.",
    )
    lost_work: Weight = Field(
        _COST.lost_work,
        description="Weight of the time for which the guest waits for its memory, or is paused.",
    )

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.total_time:
            raise ValueError("total_time must be more than 0, or the switch could wait forever")
        return self


class WhenForm(Section):
    """When a rule acts; all conditions must hold."""

    iteration: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="The current pass over memory has at least this number."
    )
    stalled_for: Time | None = Field(
        None, description="The remaining memory has not reached a new low for this long."
    )
    dirty_over_bandwidth: Ratio | None = Field(
        None, description="At least this share of what the last pass sent is dirty again."
    )
    precopy_excess: Ratio | None = Field(
        None,
        description="Compared with a switch to post-copy now, pre-copy would send at least this"
        " much more, as a share of what the first pass sent.",
    )
    lowest_cost: CostForm | None = Field(
        None,
        description="No later switch to post-copy would cost less than a switch now, nor would"
        " pre-copy alone.",
    )
    expected_downtime_above: Time | None = Field(
        None, description="A switchover now would pause the guest for longer than this."
    )
    expected_downtime_below: Time | None = Field(
        None, description="A switchover now would pause the guest for less than this."
    )
    time_used: TimeUsedValue | None = Field(
        None, description="This much time, or this share of the time limit, has been used."
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
    increment: PerCent = Field(10, description="Per cent added whenever there is no progress.")
    at_most: PerCent = Field(60, description="The upper limit, in per cent.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.initial > self.at_most:
            raise ValueError(f"initial {self.initial} is more than at_most {self.at_most}")
        return self


_PAGE = 4096


class CompressForm(Section):
    """Sending only differences from previously sent pages."""

    cache: Size = Field(CACHE, description="Memory on the source for copies of sent pages.")

    @field_validator("cache")
    @classmethod
    def _as_qemu_wants(cls, cache: Bytes) -> Bytes:
        """Require a power of two, at least one page; otherwise QEMU fails during the migration."""
        if cache >= _PAGE and cache & (cache - 1) == 0:
            return cache
        nearest = max(_PAGE, 1 << (max(1, cache).bit_length() - 1))
        raise ValueError(f"must be a power of two, such as {show_bytes(Bytes(nearest))}")


class DoForm(Section):
    """An action with values. Set exactly one of these keys."""

    raise_downtime: RaiseForm | None = Field(None, description="Allow a longer downtime.")
    auto_converge: ThrottleForm | None = Field(None, description="Slow the guest down.")
    compress: CompressForm | None = Field(
        None, description="Send only differences from previously sent pages (xbzrle)."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = sum(getattr(self, name) is not None for name in WITH_VALUES)
        if given != 1:
            raise ValueError("a rule must have exactly one action; write one rule per action")
        return self


def _kind_of_do(value: Any) -> str:
    return "(values)" if isinstance(value, dict | DoForm) else "(word)"


class RuleForm(Section):
    """A rule: an action, and when it is taken."""

    name: Text | None = Field(None, description="Name of the rule in reports.")
    when: WhenForm = Field(WhenForm(), description="Conditions that must all hold; empty: always.")
    do: Annotated[
        Annotated[PlainWord, Tag("(word)")] | Annotated[DoForm, Tag("(values)")],
        Discriminator(_kind_of_do),
    ] = Field(description="The action.")


class ConvergeForm(Section):
    """What is done about a guest that writes faster than the network can send."""

    stall: StallForm = Field(StallForm(), description="When a migration counts as stalled.")
    rules: list[RuleForm] = Field(
        [],
        description="Checked in order at each sample; the first applicable rule acts.",
    )
