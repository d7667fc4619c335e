"""Small whole worlds, facts and policies for the tests of forecasts."""

from dataclasses import replace

from tests.support.builders import GUEST
from vmckpt.migration import request as contract
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.forecast.forecast import Facts, Range
from vmckpt.migration.forecast.simulator import World
from vmckpt.migration.run.decide import RunTerms
from vmckpt.model.guest import Guest
from vmckpt.model.migration import DirtyPoint, Mode
from vmckpt.policy.model import MoveLimits, Policy, Rule
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

TIMES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 6.0)


def guest(mib: int) -> Guest:
    return replace(GUEST, memory=Bytes(mib * MIB))


def policy(
    *rules: Rule, limit: float | None = 60.0, mode: Mode = Mode.PRECOPY, downtime: float = 0.3,
    bandwidth: float | None = None,
) -> Policy:  # fmt: skip
    limits = MoveLimits(
        max_downtime=Seconds(downtime),
        time=None if limit is None else Seconds(limit),
        bandwidth=None if bandwidth is None else BytesPerSecond(round(bandwidth * MIB)),
    )
    return Policy(name="p", file="p.yaml", limits=limits, mode=mode, rules=rules)


def writer(region: float, rate: float, background: float = 1.2) -> list[tuple[float, float]]:
    """A guest that rewrites a region of so many MiB at so many MiB/s: points in bytes."""
    return [
        (t, (min(region, rate * t) + min(3.5, background * t)) * MIB) if region else (t, 0.0)
        for t in TIMES
    ]


def facts(
    memory: int = 256, in_use: float = 132, *, region: float = 64, rate: float = 10,
    bandwidth: float = 45.6,
) -> Facts:  # fmt: skip
    points = writer(region, rate)
    return Facts(
        memory=Bytes(memory * MIB),
        in_use=Range(0.99 * in_use * MIB, 1.01 * in_use * MIB),
        dirty=tuple(
            DirtyPoint(time=Seconds(t), dirtied=u, error=0.4 * MIB if u else 0.0) for t, u in points
        ),
        bandwidth=Range(0.94 * bandwidth * MIB, 1.02 * bandwidth * MIB),
        later=Range(0.94 * bandwidth * MIB, 1.02 * bandwidth * MIB),
        setup=Range(0.35, 0.9),
        stop=Range(0.01, 0.08),
    )


def world(
    in_use: float = 100, *, region: float = 0, rate: float = 0, bandwidth: float = 50
) -> World:
    memory = 256.0 * MIB
    return World(
        in_use=in_use * MIB,
        memory=memory,
        curve=DirtyCurve(tuple(writer(region, rate, background=0)), memory),
        bandwidth=bandwidth * MIB,
        later_bandwidth=bandwidth * MIB,
        postcopy_bandwidth=bandwidth * MIB,
        setup=0.5,
        backlog=0.0,
        stop=0.02,
        overshoot=0.0,
        tail=((memory, in_use * MIB),),
    )


def terms(
    *rules: Rule, limit: float | None = None, mode: Mode = Mode.PRECOPY, downtime: float = 0.3
) -> RunTerms:
    return contract.terms(policy(*rules, limit=limit, mode=mode, downtime=downtime), mode, GUEST)
