"""The vmckpt lab commands: libvirt hosts on one machine, and campaigns of random faults."""

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import JSON
from vmckpt.errors import BadInput, LabError
from vmckpt.units import BytesPerSecond, show_bytes, show_rate, show_seconds
from vmckpt_lab import delay_proxy as far
from vmckpt_lab import guests, host, lab, ledger, network
from vmckpt_lab.chaos import plan as plans
from vmckpt_lab.chaos import run as chaos_run
from vmckpt_lab.chaos.run import Campaign, Wrong
from vmckpt_lab.debian import guest as debian
from vmckpt_lab.observer import client
from vmckpt_lab.plan import LabPlan

_HOSTS = 3


def chaos(
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Duration in minutes. Default: 10; with --operations, no limit."
        ),
    ] = None,
    operations: Annotated[int | None, typer.Option(min=1, help="Number of operations.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the operations. Default: random.")
    ] = None,
    first: Annotated[
        int, typer.Option(min=1, help="Start with operation N of the seed's sequence.")
    ] = 1,
    postgres: Annotated[
        bool,
        typer.Option(
            "--postgres", help="Keep the journal in PostgreSQL; some faults restart PostgreSQL."
        ),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", "-n", metavar="LAB", help="Lab to use. Default: a temporary lab."),
    ] = None,
    json: JSON = False,
) -> None:
    """Run random migrations and faults in a lab, with checks.

    After each operation, vmckpt recover runs and the invariants of the guests are checked. The seed
    determines the operations. The run stops at the first violation, prints a command that repeats
    the run, and keeps the journal and the logs.

    Example:

        vmckpt lab chaos --minutes 10 --seed 7
    """
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    until = None if minutes is None and operations else time.monotonic() + (minutes or 10.0) * 60
    output.say(f"seed {seed}")
    with _lab(name, postgres=postgres) as plan:
        shaken = Campaign(plan, seed, output.say, journal=_journal(plan) if postgres else None)
        last = None if operations is None else first + operations - 1
        try:
            with shaken:
                for number in itertools.count(first):
                    late = until is not None and time.monotonic() > until
                    if late or (last is not None and number > last):
                        break
                    shaken.run(plans.operation(seed, number, postgres=postgres))
        except Wrong as exc:
            shaken.tally.failed = exc.message
            again = chaos_run.replay_command(seed, first, exc.operation, postgres=postgres)
            raise LabError(
                f"seed {seed}, {exc.message}", hint=f"repeat the run with: {again}"
            ) from exc
        finally:
            if json:
                output.print_json(shaken.tally.as_json())
    if not json:
        _show(shaken.tally)


def _journal(plan: LabPlan) -> str:
    return f"postgresql://postgres@{plan.witness_address}/postgres"


@contextmanager
def _lab(name: str | None, *, postgres: bool) -> Iterator[LabPlan]:
    """Yield the named lab, or a temporary one that is removed afterwards.

    Raises BadInput if the named lab has too few hosts, or lacks the lease store for `postgres`.
    """
    if name is not None:
        found = lab.load(name)
        if found.host_count < _HOSTS or (postgres and not found.witness):
            raise BadInput(
                f"lab {name!r} has fewer than {_HOSTS} hosts, or no lease store for --postgres",
                hint="omit --name to use a temporary lab",
            )
        yield found
        return
    own = f"chaos{os.getpid()}"
    try:
        yield lab.up(own, hosts=_HOSTS, with_witness=postgres)
    finally:
        lab.down(own)


def _show(tally: chaos_run.Tally) -> None:
    """Print the result of a campaign."""
    shown = output.table("fault", ">times")
    for fault, times in sorted(tally.faults.items()):
        shown.add_row(fault, str(times))
    output.out.print(shown)
    each = tally.seconds / max(1, tally.operations)
    output.out.print(
        f"{tally.operations} operations, {each:.1f} s each; {tally.rightly_gone} guests lost as"
        f" expected; {tally.histories} histories with {tally.history_operations} answers:"
        f" {tally.histories_broken} not linearizable, {tally.histories_unknown} unknown;"
        f" {tally.ledgers_lost} ledger errors, two running copies seen"
        f" {tally.two_copies_seen} times, {tally.unknown_states_left} states unknown after recovery"
    )


_MARKS = {True: ("green", "intact"), False: ("bold red", "BROKEN")}

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
)

app.command()(chaos)

NAME = Annotated[
    str, typer.Option("--name", "-n", envvar="VMCKPT_LAB", metavar="LAB", help="Name of the lab.")
]
HOST = Annotated[str, typer.Argument(metavar="HOST", help="Host of the lab: alpha, beta, …")]
GUEST = Annotated[str, typer.Argument(metavar="GUEST", help="Guest of the lab.")]


@app.callback()
def lab_options(context: typer.Context) -> None:
    """Create libvirt hosts on this machine for tests."""
    arguments.help_alone(context)


@app.command()
def up(
    hosts: Annotated[int, typer.Option(min=2, max=4, help="Number of hosts.")] = 2,
    shape: Annotated[
        BytesPerSecond | None,
        typer.Option(parser=arguments.rate, metavar="RATE", help="Limit of each link, like 1gbit."),
    ] = None,
    witness: Annotated[
        bool, typer.Option("--witness", help="Also start PostgreSQL, for leases or a journal.")
    ] = False,
    qemu_user: Annotated[
        str, typer.Option(metavar="USER", help="User that QEMU runs as, like libvirt-qemu.")
    ] = "root",
    name: NAME = "lab",
) -> None:
    """Start a lab.

    Remains of a crashed lab of this name are removed first.

    Example:

        vmckpt lab up --hosts 3 --shape 1gbit
    """
    made = lab.up(
        name, hosts=hosts, shape=shape, with_witness=witness, qemu_user=qemu_user, say=output.say
    )
    output.say(f"inventory: {made.inventory}")


@app.command()
def down(name: NAME = "lab") -> None:
    """Remove a lab: its processes, namespaces, links, mounts and files."""
    lab.down(name, say=output.say)


@app.command()
def status(name: NAME = "lab", json: JSON = False) -> None:
    """Show a lab's hosts and guests."""
    found = lab.load(name)
    hosts = [{"name": h.name, "address": h.address, "up": host.is_up(h)} for h in found.hosts]
    machines = [_guest_status(found, guest) for guest in guests.stored(found)]
    if json:
        output.print_json(
            {
                "name": found.name,
                "inventory": str(found.inventory),
                "hosts": hosts,
                "guests": machines,
            }
        )
        return
    shown = output.table("host", "address", "state")
    for one in hosts:
        shown.add_row(str(one["name"]), str(one["address"]), "up" if one["up"] else "off")
    output.out.print(shown)
    shown = output.table("guest", "address", ">memory", ">dirty", ">heard")
    for guest, machine in zip(guests.stored(found), machines, strict=True):
        dirty = f"{show_bytes(guest.dirty)} at {show_rate(guest.dirty_rate)}"
        shown.add_row(
            guest.name, guest.address, show_bytes(guest.memory), dirty, str(machine["heard"])
        )
    output.out.print(shown)


def _guest_status(found: LabPlan, guest: guests.LabGuest) -> dict[str, Any]:
    try:
        heard: int | None = client.status(found.observer_socket, guest.name).heard
    except LabError:
        heard = None
    return {"name": guest.name, "address": guest.address, "heard": heard}


@app.command()
def guest(
    guest: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new guest.")],
    on: Annotated[str, typer.Option("--on", metavar="HOST", help="Host to start the guest on.")],
    os_name: Annotated[
        str | None,
        typer.Option("--os", metavar="NAME", help="Operating system of a real guest: debian."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory size. Default: 256MiB; with --os: 640MiB."),
    ] = None,
    dirty: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE@RATE",
            help="Size of the memory region that the guest rewrites, and the rate. Default:"
            " 64MiB@20MiB/s. Not with --os.",
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Disk size; 0: no disk. Default: 64MiB. Not with --os."),
    ] = None,
    disk_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Disk format: raw (default) or qcow2 (default with --os; has a backing file).",
        ),
    ] = None,
    private_disk: Annotated[
        bool, typer.Option("--private-disk", help="Put the disk on the host's private storage.")
    ] = False,
    shared_memory: Annotated[
        bool,
        typer.Option(
            "--shared-memory",
            help="Put the memory in a file that other processes can map. Not with --os.",
        ),
    ] = False,
    vcpus: Annotated[int, typer.Option(min=1, max=4, help="Number of vCPUs.")] = 1,
    nics: Annotated[
        int | None, typer.Option(min=1, max=2, help="Number of NICs. Only with --os.")
    ] = None,
    uefi: Annotated[
        bool, typer.Option("--uefi", help="Boot with UEFI and NVRAM. Only with --os.")
    ] = False,
    tpm: Annotated[
        bool, typer.Option("--tpm", help="Add an emulated TPM 2.0. Only with --os.")
    ] = False,
    name: NAME = "lab",
) -> None:
    """Start a guest that keeps ledgers of its memory, disk and output.

    With --os debian, start a Debian guest, defined by virt-install: systemd, guest agent, and a
    PostgreSQL server under load. A client outside records the commits that it acknowledges.

    See vmckpt lab verify.

    Example:

        vmckpt lab guest web1 --on alpha --memory 512MiB --dirty 64MiB@20MiB/s
        vmckpt lab guest db1 --on alpha --os debian
    """
    usual: dict[str, Any] = {"memory": memory, "disk_format": disk_format}
    prover: dict[str, Any] = {"dirty": dirty, "disk": disk, "shared_memory": shared_memory or None}
    real: dict[str, Any] = {"nics": nics, "uefi": uefi or None, "tpm": tpm or None}
    if os_name not in (None, guests.DEBIAN):
        raise BadInput(f"unknown operating system {os_name!r}", hint="use debian")
    fits, others = (prover, real) if os_name is None else (real, prover)
    for option, value in others.items():
        if value is not None:
            other = "requires" if os_name is None else "cannot be used with"
            raise BadInput(f"--{option.replace('_', '-')} {other} --os debian")
    given = {key: value for key, value in (usual | fits).items() if value is not None}
    start = guests.start if os_name is None else debian.start
    start(
        lab.load(name), guest, on, private_disk=private_disk, vcpus=vcpus, say=output.say, **given
    )


@app.command()
def remove(guest: GUEST, name: NAME = "lab") -> None:
    """Stop a guest and remove its disk."""
    found = lab.load(name)
    guests.find(found, guest)
    guests.remove(found, guest)


@app.command()
def verify(guest: GUEST, name: NAME = "lab", json: JSON = False) -> None:
    """Compare a guest's ledgers to find lost data.

    The exit code is 30 if data was lost.
    """
    found = lab.load(name)
    known = guests.find(found, guest)
    audit = debian.audit(found, known) if known.os else ledger.audit(found, guest)
    if json:
        output.print_json(
            {
                "guest": audit.guest,
                "whole": audit.whole,
                "ledgers": {
                    entry.name: {"whole": entry.whole, "text": entry.text}
                    for entry in audit.entries
                },
            }
        )
    else:
        for entry in audit.entries:
            mark = output.styled(*_MARKS[entry.whole])
            output.out.print(mark, f"{entry.name:<7} {entry.text}")
    if not audit.whole:
        raise LabError(f"{guest} is not intact: at least one check has failed")


@app.command()
def cut(
    host_name: HOST,
    guests_too: Annotated[
        bool, typer.Option("--guests", help="Also cut the guests' network.")
    ] = False,
    name: NAME = "lab",
) -> None:
    """Cut a host off from the network."""
    found, chosen = _host(name, host_name)
    network.cut(found, chosen, guests_too=guests_too)


@app.command()
def heal(host_name: HOST, name: NAME = "lab") -> None:
    """Restore a host's network and bandwidth, and power it on."""
    lab.heal(*_host(name, host_name))


@app.command()
def kill(host_name: HOST, name: NAME = "lab") -> None:
    """Power a host off: all its processes die at once."""
    found, chosen = _host(name, host_name)
    host.power_off(found.host(chosen))


@app.command()
def shape(
    host_name: HOST,
    rate: Annotated[
        str, typer.Argument(metavar="RATE", help="Bandwidth, like 200mbit; 'off' for no limit.")
    ],
    name: NAME = "lab",
) -> None:
    """Limit the bandwidth of a host's link in both directions."""
    found, chosen = _host(name, host_name)
    network.shape(found, chosen, None if rate == "off" else arguments.rate(rate))


@app.command()
def delay(
    host_name: HOST,
    one_way: Annotated[
        str, typer.Argument(metavar="TIME", help="One-way delay, like 40ms; 'off' for none.")
    ],
    name: NAME = "lab",
) -> None:
    """Delay the streams of migrations to a host, in both directions."""
    found, chosen = _host(name, host_name)
    far.put(found, chosen, None if one_way == "off" else arguments.seconds(one_way))


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    host_name: HOST,
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="Command to run on the host.")
    ],
    name: NAME = "lab",
) -> None:
    """Run a command on a host.

    Example:

        vmckpt lab run alpha virsh list
    """
    found, chosen = _host(name, host_name)
    sys.exit(subprocess.run(host.enter(found.host(chosen), *command), check=False).returncode)


@app.command()
def observe(
    guest: GUEST,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Duration; 0: until Ctrl-C.")
    ] = 0.0,
    name: NAME = "lab",
) -> None:
    """Show what the observer sees of a guest, once per second.

    Each line shows the longest silence, the highest number received, the rate of memory writes, how
    many numbers were sent twice with different contents, and how many the guest has forgotten.
    """
    found = lab.load(name)
    guests.find(found, guest)
    began = last = time.monotonic()
    pages: int | None = None
    while not seconds or time.monotonic() - began < seconds:
        time.sleep(1.0)
        now = time.monotonic()
        seen = client.status(found.observer_socket, guest, since=last, until=now)
        written = 0 if pages is None else (seen.pages_written - pages) * 4096 / (now - last)
        pages, last = seen.pages_written, now
        output.out.print(
            f"{now - began:6.0f}s longest silence {show_seconds(seen.blackout)}, highest number"
            f" {seen.highest}, writes {show_rate(written)}, sent twice {seen.conflicts},"
            f" forgotten {seen.forgotten}"
        )


def _host(name: str, host_name: str) -> tuple[LabPlan, str]:
    found = lab.load(name)
    names = [h.name for h in found.hosts]
    if host_name not in names:
        raise BadInput(
            f"lab {name!r} has no host {host_name!r}", hint=f"use one of {', '.join(names)}"
        )
    return found, host_name
