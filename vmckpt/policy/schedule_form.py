"""The part of a policy's file that is about snapshots; see `form`."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vmckpt.policy.schedules import FAILURE, Check
from vmckpt.policy.values import Calendar, CheckWord, Often, Period

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
