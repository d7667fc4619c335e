"""Who is to leave which host, and where to. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from vmckpt.evacuate.course import Patience, Terms
from vmckpt.evacuate.fleet import Fleet, Rules, Tenant, Weights
from vmckpt.evacuate.schedule import Windows
from vmckpt.evacuate.seen import Seen
from vmckpt.policy.evacuation import Evacuation, Strategy


class Kind(StrEnum):
    """What is done to a host; the kind of its operation, too."""

    EVACUATE = "evacuate"
    REPOPULATE = "repopulate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An order."""

    kind: Kind
    host: str
    to: frozenset[str] | None = None
    """Only to these hosts; None: to any."""
    guests: frozenset[str] = frozenset()
    """To be brought back, by UUID."""
    start: frozenset[str] = frozenset()
    """To be started again there, by UUID."""
    policy: str | None = None
    """By name, for every guest and for the run; None: each its own."""

    def asked(self, seen: Seen) -> frozenset[str]:
        """Who is still to move, by the names of `seen`."""
        if self.kind is Kind.REPOPULATE:
            return frozenset(
                name for name, one in seen.known.items()
                if one.guest.uuid in self.guests and one.host != self.host
            )  # fmt: skip
        return frozenset(
            one.name for one in seen.fleet.tenants
            if one.host == self.host and not self.shuts_down(seen, one.name)
        )  # fmt: skip

    def to_shut_down(self, seen: Seen) -> frozenset[str]:
        """Who is to be shut down instead."""
        if self.kind is Kind.REPOPULATE:
            return frozenset()
        return frozenset(
            one.name for one in seen.fleet.tenants
            if one.host == self.host and one.stays is None and self.shuts_down(seen, one.name)
        )  # fmt: skip

    @staticmethod
    def shuts_down(seen: Seen, name: str) -> bool:
        """Whether a guest's policy has it shut down."""
        known = seen.known.get(name)
        return known is not None and known.policy.evacuation.strategy is Strategy.SHUT_DOWN

    def fleet(self, seen: Seen) -> Fleet:
        """As a placement for this task is to see it."""
        asked = self.asked(seen)
        places = tuple(
            replace(one, closed="it is emptied")
            if self.kind is Kind.EVACUATE and one.name == self.host else one
            for one in seen.fleet.places
        )  # fmt: skip
        return Fleet(
            places, tuple(self._bound(one, one.name in asked) for one in seen.fleet.tenants)
        )

    def _bound(self, tenant: Tenant, asked: bool) -> Tenant:
        to = frozenset({self.host}) if self.kind is Kind.REPOPULATE else self.to
        if not asked or to is None:
            return tenant
        return replace(tenant, needs=replace(tenant.needs, only=to))

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": str(self.kind), "host": self.host,
            "to": None if self.to is None else sorted(self.to),
            "guests": sorted(self.guests), "start": sorted(self.start), "policy": self.policy,
        }  # fmt: skip

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Raises KeyError, ValueError, TypeError for what is none."""
        to = told["to"]
        return cls(
            kind=Kind(told["kind"]), host=str(told["host"]),
            to=None if to is None else frozenset(map(str, to)),
            guests=frozenset(map(str, told["guests"])), start=frozenset(map(str, told["start"])),
            policy=told["policy"],
        )  # fmt: skip


def terms(run: Evacuation, kind: Kind) -> Terms:
    """What a run keeps to, by the policy that it is done by."""
    return Terms(
        rules=Rules(
            keep_free=run.keep_free,
            weights=Weights(spread=run.spread, prefer=run.prefer, stay_near=run.stay_near),
            may_displace=run.displace and kind is Kind.EVACUATE,
        ),
        windows=Windows(
            per_source=run.per_source, per_target=run.per_target, total=run.at_once,
            order=run.order,
        ),
        patience=Patience(tries=run.tries, first_wait=run.first_wait),
    )  # fmt: skip
