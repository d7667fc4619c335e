"""The part of a policy's file that is about emptying a host; see `form`."""

from typing import Annotated

from pydantic import Field

from vmckpt.policy.evacuation import Evacuation, Order, Strategy
from vmckpt.policy.schedule_form import Section
from vmckpt.policy.values import OrderWord, Part, StrategyWord, Time

_DEFAULT = Evacuation()
_Labels = dict[str, str]
_Weight = Annotated[float, Field(ge=-100, le=100, strict=False)]
_Some = Annotated[int, Field(ge=1, le=1000)]


class WeightsForm(Section):
    """What makes one host better than another."""

    spread: _Weight = Field(
        _DEFAULT.spread, description="Equal loads; below 0: few hosts, well filled."
    )
    prefer: _Weight = Field(_DEFAULT.prefer, description="Hosts with labels that are preferred.")
    stay_near: _Weight = Field(
        _DEFAULT.stay_near, description="Hosts that see the same storage as the one before."
    )


class AtOnceForm(Section):
    """How many move at once."""

    source: _Some = Field(_DEFAULT.per_source, description="Away from one host.")
    target: _Some = Field(_DEFAULT.per_target, description="To one host.")
    total: _Some = Field(_DEFAULT.at_once, description="In all.")


class EvacuateForm(Section):
    """How a host is emptied, and what becomes of the guest then."""

    strategy: StrategyWord = Field(
        Strategy.MIGRATE, description="What becomes of a guest; leave: it stays."
    )
    move_shut_off: bool = Field(
        _DEFAULT.move_shut_off, description="A guest that is off is defined on another host."
    )
    priority: Annotated[int, Field(ge=-1000, le=1000)] = Field(
        _DEFAULT.priority, description="Guests with a higher one go first."
    )
    apart: list[str] = Field(
        [], description="Labels; guests with the same value of one never share a host."
    )
    needs: _Labels = Field({}, description="Labels that the new host must have.")
    prefers: _Labels = Field({}, description="Labels that the new host should have.")
    shutdown: Time = Field(
        _DEFAULT.shutdown, description="A guest that is to shut down may take that long."
    )
    order: OrderWord = Field(
        Order.LONGEST, description="Who goes first among those of one priority."
    )
    at_once: AtOnceForm = Field(AtOnceForm(), description="How many move at once.")
    keep_free: Part = Field(
        _DEFAULT.keep_free, description="Of each host's memory, also while guests arrive."
    )
    cpu_overcommit: Annotated[float, Field(gt=0, le=1000, strict=False)] = Field(
        _DEFAULT.cpu_overcommit, description="CPUs of guests for each CPU of a host."
    )
    weights: WeightsForm = Field(
        WeightsForm(), description="What makes one host better than another."
    )
    displace: bool = Field(
        _DEFAULT.displace, description="Guests of other hosts may be moved to make room."
    )
    tries: Annotated[int, Field(ge=1, le=100)] = Field(
        _DEFAULT.tries, description="Attempts for each guest, on other hosts if one fails it."
    )
    first_wait: Time = Field(
        _DEFAULT.first_wait, description="After a guest's first failure; then twice as long."
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
