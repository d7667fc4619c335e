"""A trace file under a policy, from the file to the answer."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vmckpt.errors import BadInput
from vmckpt.migrate import terms, trace
from vmckpt.migrate.converge import Terms, time_limit
from vmckpt.migrate.replay import Replayed, replay
from vmckpt.model.migration import Mode
from vmckpt.policy.model import Policy
from vmckpt.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What came of a replay."""

    guest: str
    policy: str
    mode: Mode
    recorded_policy: str
    outcome: str | None
    """Of the recorded migration; None: the trace breaks off."""
    result: Replayed

    def as_json(self) -> dict[str, Any]:
        found = _finite(self.result)
        then = found["then"]
        return {
            "guest": self.guest,
            "policy": self.policy,
            "mode": str(self.mode),
            "recorded_policy": self.recorded_policy,
            "recorded_outcome": self.outcome,
            "decisions": [*found["decided"], *(then["planned"] if then is not None else [])],
            **found,
        }


def _finite(result: Replayed) -> dict[str, Any]:
    """In JSON, which has no infinity: what never ends sends without an end, too."""
    if result.then is None or math.isfinite(result.then.sent):
        return result.as_json()
    found = replace(result, then=replace(result.then, sent=0.0)).as_json()
    return {**found, "then": {**found["then"], "bytes": None}}


def replayed(path: Path, policy: Policy) -> ReplayReport:
    """Raises BadInput if the file is no trace, or the policy is not about such migrations."""
    if policy.mode is Mode.CHECKPOINT:
        raise BadInput(
            f"policy {policy.name} moves guests by epochs, which no recorded migration had",
            mend="choose another policy or --mode",
        )
    return under(policy, trace.read(path))


def under(policy: Policy, recorded: trace.Trace) -> ReplayReport:
    """What the policy would have made of that."""
    # Whether post-copy could have been used is known only if it was recorded so.
    possible = recorded.header.post_copy or recorded.header.mode is Mode.PRECOPY
    mode = terms.plain_choice(policy, post_copy=possible and policy.may_switch_early)
    held = Terms(
        policy=policy,
        mode=mode,
        memory=recorded.header.memory,
        post_copy=mode.may_switch_early,
        time_limit=time_limit(policy, recorded.header.memory),
        max_downtime=policy.limits.max_downtime,
    )
    return ReplayReport(
        guest=recorded.header.guest,
        policy=policy.name,
        mode=mode,
        recorded_policy=recorded.header.policy,
        outcome=recorded.outcome,
        result=replay(
            recorded.samples,
            recorded.decisions,
            held,
            Seconds(0.0),
            curve=recorded.header.curve,
        ),
    )
