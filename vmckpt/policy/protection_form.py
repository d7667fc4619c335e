"""The part of a policy's file that is about a standby; see `form`."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from vmckpt.policy.protection import Failover, Protection
from vmckpt.policy.schedule_form import Section
from vmckpt.policy.values import FailoverWord, Part, Time
from vmckpt.units import Seconds, parse_seconds

_DEFAULT = Protection()
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
        _DEFAULT.interval, description="Between two epochs; auto: by what an epoch costs."
    )
    slowdown: Part = Field(
        _DEFAULT.slowdown, description="For auto: the guest's time that pauses may take at most."
    )
    max_pause: Time = Field(
        _DEFAULT.max_pause, description="A guest whose pauses would be longer is not protected."
    )
    hold: Time = Field(
        _DEFAULT.hold, description="Output waits that long for a backup that is gone."
    )
    failover: FailoverWord = Field(
        Failover.MANUAL,
        description="Who decides that the host is dead; automatic may stop the guest or its host.",
    )
    lease: Annotated[Seconds, BeforeValidator(_lease), WithJsonSchema(_SCHEMA)] = Field(
        _DEFAULT.lease, description="How long a renewal of the lease is good."
    )
