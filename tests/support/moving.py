"""Terms and tracks of migrations, built from a few words."""

from collections.abc import Sequence
from dataclasses import replace

from tests.support.builders import sample
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.run.decide import RunTerms
from vmckpt.migration.run.progress import PassHistory, PassSeen
from vmckpt.model.migration import JobPhase, Mode
from vmckpt.policy.model import Do, MoveLimits, Policy, Rule, RuleCondition, Stall
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

# Passes begin two seconds apart, over a link of 100 MiB/s.
EACH = 2.0


def rule(do: Do, when: RuleCondition | None = None, name: str = "it") -> Rule:
    return Rule(name=name, when=when or RuleCondition(), do=do)


def terms(
    *rules: Rule, mode: Mode = Mode.HYBRID, limit: float | None = None,
    max_downtime: float = 0.1, patience: float = 10.0, post_copy: bool = True,
) -> RunTerms:  # fmt: skip
    made = Policy(
        name="p", file="p.yaml", mode=mode, rules=rules,
        limits=MoveLimits(max_downtime=Seconds(max_downtime)),
        stall=Stall(patience=Seconds(patience)),
    )  # fmt: skip
    return RunTerms(
        policy=made, mode=mode, memory=Bytes(1024 * MIB), post_copy=post_copy,
        time_limit=None if limit is None else Seconds(limit), max_downtime=Seconds(max_downtime),
    )  # fmt: skip


def on_its_way(
    *sizes: float,
    now: float,
    curve: Sequence[tuple[float, float]] = (),
    silent: float = 0.0,
    phase: JobPhase = JobPhase.PRE_COPY,
    left: float | None = None,
) -> PassHistory:
    """After passes that began with so many MiB, each of which sent 100 MiB; the last one goes on.

    The curve is in seconds and MiB.
    """
    passes = tuple(
        PassSeen(
            number=number, began=Seconds((number - 1) * EACH), size=int(size * MIB),
            sent_before=(number - 1) * 100 * MIB,
        )
        for number, size in enumerate(sizes, 1)
    )  # fmt: skip
    remaining = (sizes[-1] if sizes else 0) if left is None else left
    last = sample(
        now, iteration=len(sizes), remaining=int(remaining * MIB), phase=phase,
        transferred=(len(sizes) * 100 + 50) * MIB,
    )  # fmt: skip
    last = replace(last, at=Seconds(now - silent))
    return PassHistory(
        began=Seconds(0.0),
        curve=DirtyCurve(tuple((t, u * MIB) for t, u in curve), 1024.0 * MIB),
        last=last,
        passes=passes,
        bandwidth=BytesPerSecond(100 * MIB),
        moved_at=last.at,
    )
