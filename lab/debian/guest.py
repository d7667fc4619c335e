"""Start Debian guests, and check that they have lost nothing."""

import asyncio
import json
import sys
import time
from pathlib import Path

from vmckpt import inventory
from vmckpt.errors import BadInput, LabError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.units import MIB, Bytes, BytesPerSecond, parse_bytes
from vmckpt_lab import guests, host
from vmckpt_lab.debian import commits, definition, image
from vmckpt_lab.guests import LabGuest
from vmckpt_lab.lab import Say, silent
from vmckpt_lab.ledger import Audit
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.plan import LabPlan, check_name
from vmckpt_lab.shell import in_namespace, run, start_daemon

_CLIENT = "vmckpt_lab.debian.client"
_BOOTS = 240.0
"""Time limit for a boot until the database answers, in seconds. Idle machines take about 40 s."""


def start(
    lab: LabPlan,
    name: str,
    on: str,
    *,
    memory: str = "640MiB",
    disk_format: str = "qcow2",
    private_disk: bool = False,
    vcpus: int = 1,
    nics: int = 1,
    uefi: bool = False,
    tpm: bool = False,
    say: Say = silent,
) -> LabGuest:
    """Create and boot a guest, and wait until its database has acknowledged commits.

    `disk_format`: qcow2, an overlay of the cached image, or raw, a copy. Raises BadInput. Raises
    LabError or HypervisorError if the guest does not start; the guest is then removed.
    """
    try:
        check_name(name)
        size = parse_bytes(memory)
    except ValueError as exc:
        raise BadInput(f"guest {name}: {exc}") from None
    guests.check_new(lab, name, on, disk_format)
    if size < 384 * MIB:
        raise BadInput(f"guest {name}: Debian with PostgreSQL needs 384 MiB of memory")
    booted = image.prepare(say)
    folder = lab.private if private_disk else lab.shared
    addresses = guests.free_addresses(lab, nics)
    guest = LabGuest(
        name=name, address=addresses[0], more_addresses=addresses[1:], memory=size, vcpus=vcpus,
        dirty=Bytes(0), dirty_rate=BytesPerSecond(0), disk=Bytes(0), disk_format=disk_format,
        disk_path=str(folder / f"{name}.{disk_format}"), private_disk=private_disk,
        shared_memory=False, os=guests.DEBIAN,
    )  # fmt: skip
    _create_disk(lab, on, guest, booted)
    wanted = definition.DebianGuest(
        name=name, memory=size, vcpus=vcpus, disk=Path(guest.disk_path), disk_format=disk_format,
        addresses=tuple(addresses), uefi=uefi, tpm=tpm,
    )  # fmt: skip
    guests.record(lab, guest)
    say(f"{name}: starting on {on}")
    began = time.monotonic()
    try:
        xml = run(host.enter(lab.host(on), *definition.command(wanted, booted)))
        asyncio.run(_launch(lab, on, xml))
        _start_client(lab, guest)
        _wait_for_commits(lab, guest)
    except BaseException:
        guests.remove(lab, name)
        raise
    say(f"{name}: up at {guest.address} after {time.monotonic() - began:.0f} s")
    return guest


def _create_disk(lab: LabPlan, on: str, guest: LabGuest, booted: image.DebianImage) -> None:
    made = ["-O", guest.disk_format, str(booted.disk), guest.disk_path]
    words = ["qemu-img", "convert", "-f", "qcow2", *made]
    if guest.disk_format == "qcow2":
        backing = ["-F", "qcow2", "-b", str(booted.disk)]
        words = ["qemu-img", "create", "-q", "-f", "qcow2", *backing, guest.disk_path]
    run(host.enter(lab.host(on), *words))


async def _launch(lab: LabPlan, on: str, xml: str) -> None:
    async with Hypervisor(inventory.load(lab.inventory).host(on)) as hypervisor:
        await domains.define_and_start(hypervisor, xml)


def _client(lab: LabPlan, *words: str) -> list[str]:
    program = [sys.executable, "-m", _CLIENT, *words]
    return in_namespace(lab.observer_namespace, *program)


def _start_client(lab: LabPlan, guest: LabGuest) -> None:
    """Start the client; `lab down` kills the processes in all namespaces."""
    file = guests.commits_file(lab, guest.name)
    words = _client(lab, "record", guest.address, str(file))
    start_daemon(words, lab.folder / f"{guest.name}.client.log")


def _wait_for_commits(lab: LabPlan, guest: LabGuest) -> None:
    give_up, file = Deadline(_BOOTS), guests.commits_file(lab, guest.name)
    while not file.exists() or len(commits.acknowledged(file.read_text())) < 3:
        if give_up.passed():
            raise LabError(
                f"guest {guest.name} committed nothing within {_BOOTS:.0f} s, and was removed",
                hint="try again once the machine is less busy",
            )
        time.sleep(0.2)


def audit(lab: LabPlan, guest: LabGuest) -> Audit:
    """Compare the commits that a guest acknowledged with those in its database now.

    Raises LabError if the database does not answer.
    """
    # The file is read first, so the database must have all of its numbers.
    promised = guests.commits_file(lab, guest.name).read_text()
    state = json.loads(run(_client(lab, "check", guest.address)))
    return commits.judge(guest.name, promised, commits.Database(**state))
