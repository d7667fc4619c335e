"""The schema of the section `snapshots` of policy files."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from vmckpt.policy.model import FAILURE, Check
from vmckpt.policy.section import Count, Section, Text
from vmckpt.policy.values import Calendar, CheckWord, Often, Period


class KeepForm(Section):
    """How many snapshots are kept; a snapshot is kept if any of these rules applies to it."""

    last: Count = Field(0, description="Keep this many of the newest snapshots.")
    hourly: Count = Field(
        0, description="Keep the newest snapshot of each of the last N hours with snapshots."
    )
    daily: Count = Field(
        0, description="Keep the newest snapshot of each of the last N days with snapshots."
    )
    weekly: Count = Field(
        0, description="Keep the newest snapshot of each of the last N weeks with snapshots."
    )
    monthly: Count = Field(
        0, description="Keep the newest snapshot of each of the last N months with snapshots."
    )

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise ValueError("keeps no snapshots; write {last: 7}, or remove keep to keep all")
        return self


class CopyForm(Section):
    """Another store to which the snapshots are copied."""

    to: Text = Field(description="The name of a store in the inventory.")
    keep: KeepForm | None = Field(
        None, description="Snapshots to keep in this store; the others are pruned. Default: all."
    )


class VerifyForm(Section):
    """How often snapshots are verified."""

    every: Period = Field(description="Time between verifications.")
    depth: CheckWord = Field(
        Check.SEALED, description="Depth of the check; deep needs the snapshots' decryption key."
    )


class ScheduleForm(Section):
    """When snapshots are taken, where they are stored, and which are kept."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = Field(
        description="Tag of its snapshots: lower-case letters, digits, dots, underscores, dashes."
    )
    every: Often = Field(
        None, description="Interval; auto: computed from the cost of a snapshot (Young, Daly)."
    )
    at: Calendar | None = Field(None, description="Calendar times, in the local time zone.")
    one_failure_in: Period | None = Field(
        None, description="For auto: assumed time between failures, until the journal has data."
    )
    memory: bool = Field(True, description="Whether to include the guest's memory.")
    group: bool = Field(
        False, description="Whether to capture all guests with this schedule at the same instant."
    )
    store: Text | None = Field(
        None, description="Store for the snapshots; by default the first store in the inventory."
    )
    keep: KeepForm | None = Field(
        None, description="Snapshots to keep in `store`; the others are pruned. Default: all."
    )
    copies: Annotated[list[CopyForm], Field(max_length=8)] = Field(
        [], description="Other stores to which the snapshots are copied in the background."
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
            raise ValueError("a group snapshot always includes memory; remove memory: no")
        if self.group and self.automatic:
            raise ValueError("auto is computed per guest; for a group, use an interval like 1h")
        return self

    @property
    def automatic(self) -> bool:
        """Whether the file sets every: auto."""
        return "every" in self.model_fields_set and self.every is None

    @property
    def failure(self) -> float:
        """The value of `one_failure_in` or its default, in seconds."""
        return self.one_failure_in or FAILURE
