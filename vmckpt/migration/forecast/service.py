"""Measure and forecast before a migration, and score the forecast afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal.migration_history import PastMove
from vmckpt.migration import request
from vmckpt.migration.forecast import choose_mode
from vmckpt.migration.forecast.choose_mode import Measured
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.forecast.forecast import Facts, Forecast, forecast
from vmckpt.migration.forecast.measure import Links, measure
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.migration.run.engine import Ending
from vmckpt.migration.run.progress import UNKNOWN
from vmckpt.model.guest import Guest
from vmckpt.model.migration import Mode, Outcome
from vmckpt.policy.model import Policy
from vmckpt.units import Bytes, Seconds, show_bytes, show_seconds

_ALL = (Mode.PRECOPY, Mode.HYBRID, Mode.POSTCOPY, Mode.STOP_AND_COPY)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestForecast:
    """The measurements of a guest, and a forecast for each mode that was considered."""

    facts: Facts
    forecasts: tuple[Forecast, ...]

    @property
    def curve(self) -> DirtyCurve:
        """The guest's dirtying curve, in the middle of its range; no points if not measured."""
        return self.facts.curve(0.5) if self.facts.dirty else UNKNOWN

    def of(self, mode: Mode) -> Forecast | None:
        """Return the forecast for `mode`; None if there is none."""
        return next((one for one in self.forecasts if one.mode is mode), None)

    def as_json(self, mode: Mode) -> dict[str, Any]:
        """Return the forecast for `mode` and its facts, for the journal and for reports."""
        one = self.of(mode)
        return {
            "facts": self.facts.as_json(),
            "mode": str(mode),
            "expected": None if one is None else one.as_json(),
        }


async def forecast_guest(
    hosts: tuple[Hypervisor, Hypervisor],
    guest: Guest,
    policy: Policy,
    *,
    past: Sequence[PastMove],
    probe: Seconds,
    remotes: Remotes | None,
    post_copy: bool,
    every_mode: bool,
    links: Links | None = None,
    disks: Bytes = Bytes(0),
) -> GuestForecast:
    """Measure for about `probe`, then forecast the policy's mode.

    With `every_mode`, or if the policy's mode is AUTO, all modes that are possible are forecast.
    `post_copy`: post-copy is possible. `disks`: bytes of disks that are copied before memory.
    """
    facts = await measure(*hosts, guest, policy, past, probe=probe, remotes=remotes, links=links)
    if disks:
        words = f"{show_bytes(disks)} of disk data is copied first"
        facts = replace(facts, disks=disks, basis=(*facts.basis, words))
    if every_mode or policy.mode is Mode.AUTO:
        modes = [mode for mode in _ALL if post_copy or not mode.may_switch_early]
    else:
        modes = [request.plain_choice(policy, post_copy=post_copy)]
    return GuestForecast(
        facts=facts, forecasts=tuple(forecast(facts, policy, mode, guest) for mode in modes)
    )


def mode_of(policy: Policy, outlook: GuestForecast | None, *, post_copy: bool) -> tuple[Mode, str]:
    """Return the mode of the migration, and the reason in words.

    `post_copy`: post-copy is possible.
    """
    if policy.mode is Mode.AUTO and outlook is not None:
        return choose_mode.choose(outlook.forecasts, policy, post_copy_possible=post_copy)
    mode = request.plain_choice(policy, post_copy=post_copy)
    if mode is Mode.CHECKPOINT:
        return mode, (
            "set by the policy: a copy of the running guest, then epochs until the last epoch is"
            f" expected to take at most {show_seconds(policy.limits.max_downtime)}"
        )
    if mode is policy.mode:
        return mode, "set by the policy"
    if policy.mode is Mode.AUTO:
        return mode, "nothing was measured"
    return mode, "post-copy is not possible for this guest on these hosts"


def score(outlook: GuestForecast, mode: Mode, ending: Ending) -> dict[str, Any] | None:
    """Return the score of the forecast for `mode`; None if this mode was not forecast."""
    expected = outlook.of(mode)
    if expected is None:
        return None
    totals, disks = ending.totals, outlook.facts.disks
    sent: Bytes | None = ending.samples[-1].transferred if ending.samples else Bytes(0)
    if totals is not None:
        sent = Bytes(totals.transferred + disks)  # libvirt's final statistics lack the disks
    elif disks:
        sent = None  # samples count the zeros of a disk, which are not sent
    measured = Measured(
        completed=ending.outcome is Outcome.COMPLETED,
        total=totals.total if totals is not None else ending.elapsed,
        downtime=totals.downtime if totals is not None else None,
        sent=sent,
    )
    return choose_mode.score(expected, measured).as_json()
