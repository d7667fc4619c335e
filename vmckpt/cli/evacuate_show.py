"""Plans and reports of whole hosts, for people."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live

from vmckpt.cli import moving, output
from vmckpt.cli.moving import Row
from vmckpt.errors import at_host
from vmckpt.model.events import Decided, Event, OnItsWay, Sampled
from vmckpt.units import Bytes, Seconds, show_bytes, show_seconds

if TYPE_CHECKING:
    from vmckpt.app.evacuation import Imagined
    from vmckpt.evacuation.plan.placement import Going
    from vmckpt.evacuation.plan.plan import Checked, Plan
    from vmckpt.evacuation.report import Report

_NAMED = 8
"""So many guests are named that go somewhere for one reason."""


class Story:
    """What happens, a line each, on stderr; on a terminal also how far each guest is."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._rows: dict[str, Row] = {}
        self._logged = -math.inf
        self._live: Live | None = None

    def take(self, event: Event) -> None:
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        match event:
            case Decided():
                at = show_seconds(now - self._began)
                output.say(f"{at:>8} {event.decision.action}: {event.decision.reason}")
                self._logged = now  # who has just read something waits for the next line
            case OnItsWay(sampled=None):
                self._rows.pop(event.guest, None)
            case OnItsWay(sampled=Sampled() as sampled):
                self._rows[event.guest] = Row(event.guest, event.target, sampled)
                if self._live is None and now - self._logged >= moving.LOG_EVERY:
                    self._logged = now
                    at = show_seconds(now - self._began)
                    output.say(f"{at:>8} {moving.line(list(self._rows.values()))}")
            case _:
                pass  # what a single move tells is in its own job

    @contextmanager
    def going(self, title: str) -> Iterator[None]:
        """While moves are made."""
        if not output.err.is_terminal:
            yield
            return
        self._live = Live(
            get_renderable=lambda: self._panel(title), console=output.err, refresh_per_second=4,
            transient=True,
        )  # fmt: skip
        with self._live:
            yield

    def _panel(self, title: str) -> Group:
        elapsed = Seconds(0.0 if self._began is None else time.monotonic() - self._began)
        rows = list(self._rows.values())
        return moving.panel(title, f"{len(rows)} on their way", elapsed, rows)

    @contextmanager
    def looking(self, what: str) -> Iterator[None]:
        """Something that takes a while."""
        if not output.err.is_terminal:
            output.say(f"{what} ...")
            yield
        else:
            with output.err.status(output.in_one_line(what)):
                yield


def show_plan(plan: "Plan", console: Console) -> None:
    """Who goes where and why, how full hosts become, and what stands against it."""
    from vmckpt.evacuation.task import Kind

    host = plan.task.host
    if plan.going:
        _moves(plan, console)
    for tenant in plan.shut_down:
        console.print(f"{tenant.name}: is shut down and started again by vmckpt repopulate {host}")
    for tenant in plan.suspended:
        console.print(f"{tenant.name}: is saved there and goes on by vmckpt repopulate {host}")
    for tenant in plan.starts:
        console.print(f"{tenant.name}: is started there again ({show_bytes(tenant.memory)})")
    if plan.course.loads:
        _hosts(plan, console)
    for name, why in sorted(plan.silent.items()):
        console.print(f"not used: {at_host(name, why)}")
    for one in (*plan.left, *plan.not_started):
        console.print(output.styled("bold", f"stays: {one.tenant.name}:"), one.why)
        console.print(f"        → {one.mend}")
    stops = plan.shut_down or plan.suspended
    if not (plan.going or plan.left or stops or plan.starts or plan.not_started):
        text = {
            Kind.EVACUATE: f"{host} is empty", Kind.BALANCE: "no move would pay for itself",
        }.get(plan.task.kind, f"{host} has all that was moved away and still runs")  # fmt: skip
        console.print(f"{text}; nothing is to be done")
        return
    total = plan.total.show(show_seconds)
    console.print(f"{len(plan.going)} moves, {total} in all")


def _moves(plan: "Plan", console: Console) -> None:
    begins = {one.move.name: one.begins for one in plan.course.steps}
    table = output.table("guest", "to", ">size", "how", ">begins", ">takes", ">downtime")
    going = sorted(plan.going, key=lambda one: begins.get(one.tenant.name, 0.0))
    for one in going:
        found, begin = plan.check(one), begins.get(one.tenant.name)
        takes = "–" if found is None or found.total is None else found.total.show(show_seconds)
        pause = (
            "–" if found is None or found.downtime is None else found.downtime.show(show_seconds)
        )
        table.add_row(
            one.tenant.name, one.target, _size(one, found),
            "–" if found is None else found.mode,
            "–" if begin is None else f"+{show_seconds(begin)}", takes, pause,
        )  # fmt: skip
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for one in going:
        reasons.setdefault(f"→ {one.target}: {one.why}", []).append(one.tenant.name)
    for why, names in reasons.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        console.print(f"{', '.join(names[:_NAMED])}{more} {why}")
    for one in going:
        found = plan.check(one)
        for warning in found.warnings if found is not None else ():
            console.print(f"warning: {one.tenant.name} → {one.target}: {warning.text}")


def _size(going: "Going", found: "Checked | None") -> str:
    """Of its memory; of one that is off, what travels."""
    from vmckpt.evacuation.plan.inventory import Way

    if found is None or found.mode != Way.OFFLINE:
        return show_bytes(going.tenant.travels)
    return "–" if found.sent is None else show_bytes(Bytes(round(found.sent.high)))


def _hosts(plan: "Plan", console: Console) -> None:
    table = output.table(
        "host", ">memory", ">before", ">at most", ">after", ">CPUs before", ">after"
    )
    for one in plan.course.loads:
        table.add_row(
            one.host, show_bytes(one.memory), show_bytes(one.before), show_bytes(one.most),
            show_bytes(one.after), f"{one.cpus_before:g}", f"{one.cpus_after:g}",
        )  # fmt: skip
    console.print(table)


def show_plays(found: "Imagined") -> None:
    """How a plan on paper went when it was played."""
    from vmckpt.app import evacuation

    if found.plan.going:
        output.out.print(
            f"played {found.plays} times, durations off by up to {evacuation.LUCK.off:.0%} and"
            f" {evacuation.LUCK.fails:.0%} of the moves failing: {found.total.show(show_seconds)},"
            f" {found.arrived} of {len(found.plan.going)} arrived each time"
        )


def show_report(report: "Report") -> None:
    """What became of each guest."""
    from vmckpt.evacuation.task import Kind

    if report.arrived:
        table = output.table("guest", "from", "to", ">took", ">downtime", "job")
        for one in report.arrived:
            pause = "–" if one.downtime is None else show_seconds(one.downtime)
            table.add_row(
                one.guest, one.source, one.target, show_seconds(one.took), pause, one.job or "–"
            )
        output.out.print(table)
    for uuid in report.shut_down:
        how = "suspended" if uuid in report.suspended else "shut down"
        output.out.print(f"{how}: {uuid}; vmckpt repopulate {report.task.host} starts it")
    for name in report.started:
        output.out.print(f"started: {name}")
    for lost in report.bare:
        output.out.print(output.styled("bold", f"{lost.guest} has no standby any more"))
        output.out.print(f"        → {lost.mend}")
    for left in report.ended.left:
        output.out.print(output.styled("bold", f"left: {left.tenant.name}:"), left.why)
        output.out.print(f"        → {left.mend}")
    took = show_seconds(report.ended.took)
    if report.task.kind is Kind.EVACUATE and not report.ended.left:
        host = report.task.host
        then = f"repopulate {host} brings them back"
        if not report.comes_back:
            then = f"maintenance leave {host} ends that"
        output.out.print(f"{host} is empty after {took}, and in maintenance; vmckpt {then}")
    else:
        open_again = report.task.kind is Kind.REPOPULATE
        more = f"; {report.task.host} takes guests again" if open_again else ""
        output.out.print(f"{len(report.ended.arrived)} moved in {took}{more}")
