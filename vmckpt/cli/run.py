"""vmckpt run: the service that takes snapshots by schedule, serves metrics and sends alerts."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON, POLICIES, POLICY
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.snapshot.options import DRY_RUN, IDENTITY, identity_of
from vmckpt.errors import BadInput, StoreError
from vmckpt.model.webhook import NO_MONITORING, Address, MonitoringOptions
from vmckpt.policy.model import Policy
from vmckpt.units import show_count

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.scheduler.agenda import Agenda, Row, Scene
    from vmckpt.scheduler.schedules import ScheduleSelection
    from vmckpt.scheduler.service import Told

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _address(text: str) -> Address:
    """Parse "9469", "0.0.0.0:9469" or "[::]:9469". Raises BadParameter."""
    address, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise typer.BadParameter(f"{text!r}: use [ADDRESS:]PORT, like 9469 or 0.0.0.0:9469")
    return Address(host=address.strip("[]") or "127.0.0.1", port=int(port))


@app.command()
def run(
    guests: Annotated[
        list[str] | None,
        typer.Argument(metavar="GUEST", help="Only these guests. Default: all."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Perform the actions due now, then exit; for cron.")
    ] = False,
    metrics: Annotated[
        Address | None,
        typer.Option(
            parser=_address,
            metavar="[ADDRESS:]PORT",
            help="Serve Prometheus metrics. Default address: 127.0.0.1, this machine only.",
        ),
    ] = None,
    dry_run: DRY_RUN = False,
    policy: POLICY = None,
    policies: POLICIES = None,
    identity: IDENTITY = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Run the service for scheduled snapshots, metrics and alerts.

    The service takes, copies, verifies and prunes snapshots according to the schedules in the
    guests' policies, until it is stopped. With --metrics, it serves metrics of hosts, jobs,
    standbys and snapshots to Prometheus. It sends alerts to the webhooks, Alertmanagers and Apprise
    services in the inventory (to test them, use vmckpt notify). It is also the failure detector for
    guests that are protected with --failover automatic and without a lease store: if the host of
    such a guest does not answer, its fence agent powers the host off, and the protected guests fail
    over to their standbys. Only snapshots require schedules.

    The service prints one line for each action, or one JSON object with --json. A failed action is
    retried and does not stop other actions. Ctrl-C and SIGTERM stop the service: a snapshot in
    progress is abandoned, and the guest is unchanged; copies continue at the next start. The
    service may also be killed at any time.

    Examples:

        vmckpt run

        vmckpt run --dry-run

        vmckpt run --metrics 0.0.0.0:9469

        vmckpt run web1 --policy ./nightly.yaml --once --json
    """
    from vmckpt.app import controller, scheduler
    from vmckpt.app import policies as app_policies
    from vmckpt.scheduler.schedules import ScheduleSelection

    known = controller.load_inventory(inventory)
    everything, forced = app_policies.load_policies(known, policies, policy)
    wanted = ScheduleSelection(guests=tuple(guests or ()), policy=forced)
    say = _Teller(json=json)
    if dry_run:
        looking = _controller(known, everything, say.aside, asyncio.Event())
        told, scene = asyncio.run(scheduler.due_now(looking, wanted, say.aside))
        if json:
            output.print_json(_agenda_json(told))
        else:
            _print_agenda(told, scene)
        return
    if once and metrics is not None:
        raise typer.BadParameter("--metrics and --once are mutually exclusive")
    wishes = MonitoringOptions(metrics=metrics, alerts=known.sends_alerts and not once)
    if wishes == NO_MONITORING and (once or not scheduler.keeps_watch(known)):
        _something(everything, wanted)
    wrong = asyncio.run(
        _run(known, everything, wanted, say, once=once, identity=identity, wishes=wishes)
    )
    if once and wrong:
        raise StoreError(
            f"{show_count(wrong, 'action')} failed; see the output above",
            hint="run the command again",
        )


async def _run(
    inventory: "controller.Inventory",
    policies: Sequence[Policy],
    wanted: "ScheduleSelection",
    say: "_Teller",
    *,
    once: bool,
    identity: Any,
    wishes: MonitoringOptions,
) -> int:
    from vmckpt.app import scheduler

    stop = stop_on_signals("stopping: cancelling scheduled work in progress")
    return await scheduler.run(
        _controller(inventory, policies, say.take, stop), wanted,
        identity=identity_of(identity), once=once, tell=say.take, wishes=wishes,
    )  # fmt: skip


def _controller(
    inventory: "controller.Inventory",
    policies: Sequence[Policy],
    tell: Callable[["Told"], None],
    stop: asyncio.Event,
) -> "controller.Controller":
    from vmckpt.app.controller import Caller, Controller
    from vmckpt.scheduler.service import Told

    def warn(line: str) -> None:
        tell(Told(event="warning", text=line))

    caller = Caller(emit=lambda _: None, warn=warn, stop=stop)
    return Controller(inventory=inventory, policies=policies, caller=caller)


def _something(policies: Sequence[Policy], wanted: "ScheduleSelection") -> None:
    """Raise BadInput if no selected policy has a schedule: the service would do nothing."""
    meant = [one for one in policies if wanted.policy in (None, one.name)]
    if not any(one.snapshots for one in meant):
        what = f"policy {wanted.policy} has" if wanted.policy else "no policy has"
        no = "no schedules" if wanted.policy else "schedules"
        raise BadInput(
            f"{what} {no} for snapshots",
            hint="add snapshots: [{name: nightly, at: daily 03:00}] to a policy; see"
            " docs/policies.md",
        )


class _Teller:
    """Prints the messages of the service, one line each."""

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def take(self, told: "Told") -> None:
        """Print a message to stdout, as a result."""
        if self._json:
            output.print_json(told.as_json(), line=True)
            return
        at = datetime.fromtimestamp(told.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        mark = "warning: " if told.event == "warning" else ""
        output.out.print(output.in_one_line(f"{at} {mark}{told.text}"), soft_wrap=True)
        sys.stdout.flush()

    def aside(self, told: "Told") -> None:
        """Print a message to stderr."""
        output.say(f"{told.event}: {told.text}")


def _agenda_json(told: "Agenda") -> dict[str, Any]:
    return {
        "schedules": [_row_json(row) for row in told.rows],
        "due": [
            {"what": one.what, "text": str(one)} for one in told.work
        ],
    }  # fmt: skip


def _row_json(row: "Row") -> dict[str, Any]:
    order = row.order
    return {
        "guest": order.place.name,
        "guest_uuid": order.place.uuid,
        "host": order.place.host,
        "policy": order.policy,
        "schedule": order.schedule.name,
        "when": order.schedule.text,
        "store": order.store,
        "last": row.last,
        "due": row.due,
        "why": row.why,
        "reckoned": order.reckoned,
    }


def _print_agenda(told: "Agenda", scene: "Scene") -> None:
    from vmckpt.scheduler.jobs import CreateGroup, CreateSnapshot

    table = output.table("guest", "host", "schedule", "when", "into", "last", "due", "why")
    for row in told.rows:
        order = row.order
        due = "now" if row.due is not None and row.due <= scene.now else _time(row.due, scene.zone)
        table.add_row(
            order.place.name, order.place.host, f"{order.policy}/{order.schedule.name}",
            order.schedule.text, order.store, _time(row.last, scene.zone), due,
            output.in_one_line(row.why),
        )  # fmt: skip
    output.out.print(table if told.rows else "no guest has a schedule for snapshots")
    for row in told.rows:
        if row.order.reckoned is not None:
            output.out.print(
                f"{row.order.place.name}, {row.order.schedule.name}: {row.order.reckoned}",
                soft_wrap=True,
            )
    for work in told.work:
        if not isinstance(work, CreateSnapshot | CreateGroup):
            output.out.print(f"due now: {work}", soft_wrap=True)


def _time(at: float | None, zone: tzinfo) -> str:
    return "–" if at is None else datetime.fromtimestamp(at, zone).strftime("%Y-%m-%d %H:%M:%S")
