"""vmckpt hosts, guests, label, doctor and prepare."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import GUEST, INVENTORY, JSON
from vmckpt.cli.snapshot.options import DRY_RUN, YES, sure
from vmckpt.errors import Blocked, HostUnreachable, run_doctor, silent_hosts
from vmckpt.model import guest as model_guest
from vmckpt.model.events import Event
from vmckpt.model.finding import Severity
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.units import show_bytes, show_count

if TYPE_CHECKING:
    from vmckpt.app import controller, fleet
    from vmckpt.model.same_host import SameUuid
    from vmckpt.snapshot.prepare import Readiness


_FEW = 3
"""Maximum number of silent hosts that are each reported with the reason."""


def hosts(inventory: INVENTORY = None, json: JSON = False) -> None:
    """List hosts with their versions, memory and guests.

    Example:

        vmckpt hosts --json
    """
    from vmckpt.app import controller, fleet

    views, same = asyncio.run(fleet.hosts(controller.load_inventory(inventory)))
    if json:
        output.print_json([_host_json(view) for view in views])
    else:
        shown = output.table(
            "host", "state", "libvirt", "QEMU", ">CPUs", ">memory", ">free", ">guests"
        )
        for view in views:
            if view.facts is None:
                shown.add_row(view.host.name, output.styled("red", "unreachable"))
                continue
            facts = view.facts
            active = sum(guest.state.is_active for guest in facts.guests)
            shown.add_row(
                view.host.name,
                "up",
                facts.libvirt_version,
                facts.qemu_version,
                str(facts.cpus),
                show_bytes(facts.memory),
                show_bytes(facts.memory_free),
                f"{active} of {len(facts.guests)}",
            )
        output.out.print(shown)
    _warn_of_same_hosts(same)
    _complain({view.host.name: view.error for view in views if view.error is not None})


def _warn_of_same_hosts(same: "Sequence[SameUuid]") -> None:
    """Print a warning for each pair of names that are, or may be, one host."""
    for one in same:
        output.say(f"warning: {one.text}; {one.hint}")


def _host_json(view: "fleet.HostView") -> dict[str, Any]:
    facts = view.facts
    return {
        "name": view.host.name,
        "uri": view.host.uri,
        "labels": dict(view.host.labels),
        "reachable": facts is not None,
        "error": view.error,
        "libvirt": facts.libvirt_version if facts else None,
        "qemu": facts.qemu_version if facts else None,
        "cpus": facts.cpus if facts else None,
        "memory": facts.memory if facts else None,
        "memory_free": facts.memory_free if facts else None,
        "guests": [guest.name for guest in facts.guests] if facts else None,
    }


def guests(inventory: INVENTORY = None, json: JSON = False) -> None:
    """List the guests of all hosts.

    If a host has two names in the inventory, its guests are listed once. If the CPUs of a guest are
    running on more than one host, the command names the guest in an error and exits with code 27.

    Example:

        vmckpt guests
    """
    from vmckpt.app import controller, fleet

    known = controller.load_inventory(inventory)
    listing = asyncio.run(fleet.listing(known))
    found, errors = listing.found, listing.errors
    if json:
        output.print_json([_guest_json(host, guest) for host, guest in found])
    else:
        shown = output.table("guest", "host", "state", ">memory", ">vCPUs", "accelerator", "job")
        for host, guest in found:
            shown.add_row(
                guest.name,
                host.name,
                str(guest.state),
                show_bytes(guest.memory),
                str(guest.vcpus),
                "TCG" if guest.accelerator == "qemu" else guest.accelerator,
                guest.job or "",
            )
        output.out.print(shown)
    _warn_of_same_hosts(listing.same)
    if twice := asyncio.run(fleet.copies(known, found)):
        raise model_guest.error(twice)
    _complain(errors)


def _complain(errors: Mapping[str, str]) -> None:
    """Raise HostUnreachable if a host does not answer. `errors`: the reasons, by host."""
    if not errors:
        return
    many = f"{len(errors)} hosts do not answer: " if len(errors) > _FEW else ""
    raise HostUnreachable(
        f"{many}{silent_hosts(errors, _FEW)}", host=next(iter(errors)), hint=run_doctor(errors)
    )


def label(
    guest: GUEST,
    labels: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE|KEY-", help="Label to set; KEY- removes a label."),
    ],
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Set or remove labels of a guest.

    Policies select guests by their labels. Labels move with the guest.

    Examples:

        vmckpt label web1 tier=db owner=shop

        vmckpt label web1 owner-
    """
    from vmckpt.app import controller, fleet

    changes: dict[str, str | None] = {}
    for text in labels:
        key, equals, value = text.partition("=")
        if not equals and not text.endswith("-"):
            raise typer.BadParameter(f"{text!r}: use KEY=VALUE to set a label, KEY- to remove it")
        changes[key if equals else text[:-1]] = value if equals else None
    now = asyncio.run(fleet.label(controller.load_inventory(inventory), guest, changes))
    if json:
        output.print_json(dict(now))
    else:
        shown = " ".join(f"{key}={value}" for key, value in sorted(now.items())) or "no labels"
        output.out.print(f"{guest}: {shown}")


def _guest_json(host: Host, guest: Guest) -> dict[str, Any]:
    return {
        "name": guest.name,
        "uuid": guest.uuid,
        "host": host.name,
        "state": str(guest.state),
        "persistent": guest.persistent,
        "memory": guest.memory,
        "vcpus": guest.vcpus,
        "accelerator": guest.accelerator,
        "machine": guest.machine,
        "disks": [disk.source for disk in guest.disks],
        "networks": [nic.source for nic in guest.nics],
        "labels": dict(guest.labels),
        "job": guest.job,
    }


def doctor(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST",
            help="Hosts to check. Default: all.",
            autocompletion=arguments.hosts,
        ),
    ] = None,
    inventory: INVENTORY = None,
    json: JSON = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show only warnings and blockers.")
    ] = False,
) -> None:
    """Check that hosts meet the requirements for migration.

    The command also checks the requirements for snapshots and replication. Each warning and each
    blocker has a hint that explains how to fix the problem. The exit code is 21 if there is a
    blocker.

    Example:

        vmckpt doctor alpha beta
    """
    from vmckpt.app import controller
    from vmckpt.app import hosts as app_hosts

    found = asyncio.run(app_hosts.doctor(controller.load_inventory(inventory), hosts or []))
    fine = (Severity.OK, Severity.INFO) if quiet else ()
    shown = [finding for finding in found if finding.severity not in fine]
    if json:
        output.print_json([finding.as_json() for finding in shown])
    else:
        output.findings(output.out, shown)
    count = sum(finding.severity is Severity.BLOCKER for finding in found)
    if count:
        raise Blocked(
            f"some or all migrations are impossible: {show_count(count, 'blocker')}",
            hint="follow the hints above",
        )


prepare_app = typer.Typer(name="prepare", rich_markup_mode=None, add_completion=False)


LIVE = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Also replace network cards of the running guest: about 1 s without network each.",
    ),
]


@prepare_app.command()
def prepare(
    guest: GUEST,
    live: LIVE = False,
    dry_run: DRY_RUN = False,
    yes: YES = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Prepare a guest for fast snapshots and replication.

    The command shows which requirements are met, and adds missing elements to the guest's stored
    definition: a generation ID that lets the guest detect a restore, network cards whose output can
    be buffered, and on a host that cannot track writes, shared memory. The changes take effect when
    the guest is shut down and started again. Disk images are not converted; the findings show how
    to convert them.

    With --live, network cards of the running guest whose output cannot be buffered (vhost, several
    queues) are unplugged and plugged in again, with the same MAC and PCI address. Meanwhile the
    guest has no network, usually for about a second. Then the command waits until the guest agent
    reports the addresses again.

    Examples:

        vmckpt prepare web1 --dry-run

        vmckpt prepare web1 --live

        vmckpt prepare web1 --yes --json
    """
    from vmckpt.app import hosts as app_hosts
    from vmckpt.cli import cards

    acting = _acting(inventory, live=live)
    found = asyncio.run(app_hosts.guest_readiness(acting, guest, live=live))
    if found.to_do and not dry_run:
        if not json:
            output.findings(output.out, found.findings)
        sure(_question(found), yes=yes)
        found = asyncio.run(_make_ready(acting, guest, live=live))
        if not json and found.live is not None:
            output.findings(output.out, found.findings)
    elif not json:
        output.findings(output.out, found.findings)
    if json:
        output.print_json(found.as_json())
    else:
        output.out.print(_in_words(found, dry_run=dry_run))
        for line in cards.in_words(found):
            output.out.print(line)
    if not dry_run and (trouble := cards.trouble(found)) is not None:
        raise trouble


def _acting(inventory: Path | None, *, live: bool) -> "controller.Controller":
    from vmckpt.app import controller
    from vmckpt.app import policies as app_policies

    def unheard(_: Event) -> None:
        """Ignore progress, because the change takes only a moment."""

    caller = controller.Caller(emit=unheard, warn=output.say, stop=asyncio.Event())
    known = controller.load_inventory(inventory)
    # Only recovery needs policies, and only with --live is an interrupted job recovered first.
    policies = app_policies.survey_policies(known, None).policies if live else ()
    return controller.Controller(inventory=known, policies=policies, caller=caller)


async def _make_ready(acting: "controller.Controller", guest: str, *, live: bool) -> "Readiness":
    from vmckpt.app import hosts as app_hosts

    if live:
        stop = output.stop_on_signals("stopping: an unplugged card is first plugged in again")
        acting = replace(acting, caller=replace(acting.caller, stop=stop))
    return await app_hosts.make_ready(acting, guest, live=live)


def _question(found: "Readiness") -> str:
    changes = []
    if found.lacks:
        changes.append("change the stored definition")
    if found.live is not None and found.live.to_do:
        changes.append("replace network cards (about 1 s without network each)")
    return f"{' and '.join(changes)} of {found.guest} on {found.host}?"


def _in_words(found: "Readiness", *, dry_run: bool) -> str:
    if found.changed:
        done = f"the definition of {found.guest} on {found.host} was changed"
    elif found.lacks:
        done = f"the definition of {found.guest} on {found.host} would be changed"
    else:
        done = f"the definition of {found.guest} on {found.host} needs no change"
    if found.restart:
        then = "would take" if dry_run and found.lacks else "takes"
        return (
            f"{done}; the definition {then} effect when {found.guest} is shut down and started"
            " again"
        )
    return done
