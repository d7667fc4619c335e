"""Find every reason why a host cannot run a snapshot. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vmckpt.model import known_problems
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.host import HostFacts
from vmckpt.store.format.metadata import Contents, PrivateFacts, Public
from vmckpt.units import Bytes, show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The known facts about the host, and about files and images on the host."""

    host: str
    facts: HostFacts
    cpu_fits: bool | None = None
    """Whether the host can provide the guest's CPU; None if libvirt cannot compare the CPUs."""
    on_host: Mapping[str, bool] = field(default_factory=dict)
    """Whether each queried file exists: boot files, and files in `drives`."""
    drives: Mapping[str, str] = field(default_factory=dict)
    """Files in CD and floppy drives, by drive; not in the snapshot, but needed on the host."""
    no_networks: Sequence[str] = ()
    """libvirt networks that the guest uses and that are not active on the host."""
    disks: Mapping[str, Bytes] = field(default_factory=dict)
    """Size of each image that is overwritten, by target; missing: the image is created."""
    ram: Mapping[str, Bytes] | None = None
    """RAM blocks of the guest that is waiting for the memory; None if it was not started yet."""


def check_compatibility(
    public: Public, facts: PrivateFacts, files: Mapping[str, bytes], side: Side
) -> list[Finding]:
    """Return all findings, blockers first. `files` are the small files (NVRAM, TPM state).

    A snapshot without memory boots, so reasons that matter only to a running machine are warnings.
    """
    found = [
        *_emulator(public, side),
        *_machine(public, side),
        *_cpu(public, facts, side),
        *_firmware(facts, files, side),
        *_drives(side),
        *_networks(side),
        *_disks(facts, side),
        *_memory(public, facts, side),
    ]
    return sorted(found, key=lambda finding: finding.severity is not Severity.BLOCKER)


def _emulator(public: Public, side: Side) -> Iterator[Finding]:
    made = known_problems.version(public.qemu)
    here = known_problems.version(side.facts.qemu_version)
    text = f"made with QEMU {public.qemu}; {side.host} has {side.facts.qemu_version}"
    if not made or not here:
        yield _warning("qemu-version-unknown", side, f"{text}; cannot compare the versions")
    # A newer QEMU can load the device state; the last number of a version does not matter.
    elif here[:2] < made[:2]:
        least = ".".join(str(number) for number in made[:2])
        yield _against(
            public, "qemu-older", side, text, f"restore on a host with QEMU {least} or newer"
        )


def _machine(public: Public, side: Side) -> Iterator[Finding]:
    if public.machine not in side.facts.machines:
        yield _blocker(
            "machine-missing",
            side,
            f"{side.host}'s QEMU does not support machine type {public.machine}",
            "restore on a host with this machine type; to list a host's types, run virsh"
            " capabilities there",
        )
    if public.accelerator not in side.facts.accelerators:
        offered = ", ".join(sorted(side.facts.accelerators)) or "none"
        yield _against(
            public,
            "accelerator-missing",
            side,
            f"made with accelerator {public.accelerator}; {side.host} has {offered}",
            f"restore on a host with {public.accelerator}",
        )


def _cpu(public: Public, facts: PrivateFacts, side: Side) -> Iterator[Finding]:
    if facts.cpu_xml is None:
        return
    if side.cpu_fits is False:
        yield _against(
            public,
            "cpu-lacks-features",
            side,
            f"{side.host}'s CPU lacks features of the guest's CPU",
            "restore on a host with the same or a newer CPU",
        )
    elif side.cpu_fits is None:
        yield _warning(
            "cpu-not-compared", side, f"{side.host} cannot compare its CPU with the guest's CPU"
        )


def _firmware(facts: PrivateFacts, files: Mapping[str, bytes], side: Side) -> Iterator[Finding]:
    for path in facts.boot_files:
        there = side.on_host.get(path)
        if there is False:
            yield _blocker(
                "boot-file-missing",
                side,
                f"{path}, which the guest boots from, is not on {side.host}",
                "install the file there, or copy it there",
            )
        elif there is None:
            yield _warning("boot-file-not-asked", side, f"unknown whether {side.host} has {path}")
    for element, name, code in (("nvram", "nvram", "nvram-missing"), ("tpm", "tpm", "tpm-missing")):
        kept = any(file == name or file.startswith(f"{name}/") for file in files)
        if re.search(rf"<{element}[\s/>]", facts.domain_xml) and not kept:
            yield _warning(
                code,
                side,
                f"the guest has {element.upper()} state, but the snapshot does not include it",
                "after the restore, check what the guest finds: the host's current state, if any,"
                " or an empty state",
            )


def _drives(side: Side) -> Iterator[Finding]:
    for target, path in side.drives.items():
        if side.on_host.get(path) is False:
            yield _blocker(
                "drive-missing",
                side,
                f"{path}, which is in drive {target}, is not on {side.host}",
                "copy the file there, or create an empty file if the guest does not need its data",
            )


def _networks(side: Side) -> Iterator[Finding]:
    for name in side.no_networks:
        yield _blocker(
            "network-missing",
            side,
            f"{side.host} has no active network {name}, which the guest uses",
            f"run virsh net-start {name} there",
        )


def _disks(facts: PrivateFacts, side: Side) -> Iterator[Finding]:
    known = {disk.target for disk in facts.disks}
    for disk in facts.disks:
        size = side.disks.get(disk.target)
        if size is not None and size != disk.size:
            yield _blocker(
                "disk-size",
                side,
                f"disk {disk.target} has {show_bytes(size)} ({size} bytes) on the host and"
                f" {show_bytes(disk.size)} ({disk.size} bytes) in the snapshot",
                "restore into new images with --as",
            )
    for target in sorted(side.disks.keys() - known):
        yield _blocker(
            "disk-unknown",
            side,
            f"disk {target} is not in the snapshot and would stay unchanged",
            "detach the disk first, or restore with --as",
        )


def _memory(public: Public, facts: PrivateFacts, side: Side) -> Iterator[Finding]:
    if public.contents is not Contents.MEMORY:
        return
    if side.facts.memory_free < public.memory:
        yield _warning(
            "memory-short",
            side,
            f"{side.host} has {show_bytes(side.facts.memory_free)} of free memory, but the guest"
            f" needs {show_bytes(public.memory)}",
            "stop another guest first",
        )
    if side.ram is None:
        return
    blocks = {block.name: block.size for block in facts.ram}
    for name in sorted(blocks.keys() | side.ram.keys()):
        made, here = blocks.get(name), side.ram.get(name)
        if made == here:
            continue
        yield _blocker(
            "ram-block",
            side,
            f"RAM block {name}: {_size(made)} in the snapshot, {_size(here)} on the host",
            "the virtual hardware differs; restore with the QEMU version that made the snapshot",
        )


def _size(size: int | None) -> str:
    return "none" if size is None else f"{size} bytes"


def _against(public: Public, code: str, side: Side, text: str, hint: str) -> Finding:
    """Return a blocker if the snapshot has memory; a warning if not, as the guest just boots."""
    running = public.contents is Contents.MEMORY
    return _blocker(code, side, text, hint) if running else _warning(code, side, text, hint)


def _blocker(code: str, side: Side, text: str, hint: str) -> Finding:
    return Finding(code=code, severity=Severity.BLOCKER, where=side.host, text=text, hint=hint)


def _warning(code: str, side: Side, text: str, hint: str | None = None) -> Finding:
    return Finding(code=code, severity=Severity.WARNING, where=side.host, text=text, hint=hint)
