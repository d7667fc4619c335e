"""vmckpt hosts, guests, label, doctor and prepare."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import GUEST, INVENTORY, JSON
from vmckpt.cli.snapshot.options import DRY_RUN, YES, sure
from vmckpt.errors import Blocked, HostUnreachable
from vmckpt.model import guest as model_guest
from vmckpt.model.events import Event
from vmckpt.model.finding import Severity
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.units import show_bytes

if TYPE_CHECKING:
    from vmckpt.app import controller, fleet
    from vmckpt.snapshot.prepare import Readiness


def hosts(inventory: INVENTORY = None, json: JSON = False) -> None:
    """Show all hosts: versions, memory, guests.

    Example:

        vmckpt hosts --json
    """
    from vmckpt.app import controller, fleet

    views = asyncio.run(fleet.hosts(controller.load_inventory(inventory)))
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
    if errors := [f"{view.error}" for view in views if view.error is not None]:
        raise HostUnreachable("; ".join(errors), host="", hint="run vmckpt doctor")


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
    """Show all guests of all hosts.

    A guest whose CPUs run on more than one host is named at the end (exit code 27).

    Example:

        vmckpt guests
    """
    from vmckpt.app import controller, fleet

    known = controller.load_inventory(inventory)
    found, errors = asyncio.run(fleet.guests(known))
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
    if twice := asyncio.run(fleet.copies(known, found)):
        raise model_guest.error(twice)
    if errors:
        raise HostUnreachable(
            "; ".join(errors.values()), host=next(iter(errors)), hint="run vmckpt doctor"
        )


def label(
    guest: GUEST,
    labels: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE|KEY-", help="To set, or to take away.")
    ],
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Give a guest labels, by which policies choose it; they move with it.

    Examples:

        vmckpt label web1 tier=db owner=shop

        vmckpt label web1 owner-
    """
    from vmckpt.app import controller, fleet

    changes: dict[str, str | None] = {}
    for text in labels:
        key, equals, value = text.partition("=")
        if not equals and not text.endswith("-"):
            raise typer.BadParameter(f"{text!r}: write KEY=VALUE, or KEY- to take it away")
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
        typer.Argument(help="Hosts to examine; all if none.", autocompletion=arguments.hosts),
    ] = None,
    inventory: INVENTORY = None,
    json: JSON = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only what is wrong.")] = False,
) -> None:
    """Examine hosts: is everything there that migrations need?

    Every finding that is not ok names what mends it. Exit code 21 if something keeps migrations
    from working.

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
        raise Blocked(f"{count} finding(s) keep migrations from working", hint="see above")


prepare_app = typer.Typer(name="prepare", rich_markup_mode=None, add_completion=False)


@prepare_app.command()
def prepare(
    guest: GUEST,
    dry_run: DRY_RUN = False,
    yes: YES = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Make a guest ready for fast snapshots and for replication.

    Says what is ready, and changes the rest in its stored definition: memory that its host can map,
    an id that tells it when it was restored, cards whose output can be held back. A guest that runs
    stays as it is until it was shut down and started. Images are not converted: it says how.

    Examples:

        vmckpt prepare web1 --dry-run

        vmckpt prepare web1 --yes --json
    """
    from vmckpt.app import controller
    from vmckpt.app import hosts as app_hosts

    known = controller.load_inventory(inventory)
    found = asyncio.run(app_hosts.guest_readiness(known, guest))
    if found.lacks and not dry_run:
        if not json:
            output.findings(output.out, found.findings)
        sure(f"change the stored definition of {found.guest} on {found.host}?", yes=yes)
        found = asyncio.run(_make_ready(known, guest))
    elif not json:
        output.findings(output.out, found.findings)
    if json:
        output.print_json(found.as_json())
    else:
        output.out.print(_in_words(found, dry_run=dry_run))


async def _make_ready(inventory: "controller.Inventory", guest: str) -> "Readiness":
    from vmckpt.app import controller
    from vmckpt.app import hosts as app_hosts

    def unheard(_: Event) -> None:
        """It is over before anybody could read."""

    caller = controller.Caller(emit=unheard, warn=output.say, stop=asyncio.Event())
    acting = controller.Controller(inventory=inventory, caller=caller)
    return await app_hosts.make_ready(acting, guest)


def _in_words(found: "Readiness", *, dry_run: bool) -> str:
    if found.changed:
        done = f"the definition of {found.guest} on {found.host} was changed"
    elif found.lacks:
        done = f"the definition of {found.guest} on {found.host} would be changed"
    else:
        done = f"the definition of {found.guest} on {found.host} is as it should be"
    if found.restart:
        then = "would be" if dry_run and found.lacks else "is"
        return f"{done}; it {then} so once {found.guest} was shut down and started"
    return done
