"""Describe a Debian guest to virt-install, which writes its definition. Pure."""

from dataclasses import dataclass
from pathlib import Path

from vmckpt.units import MIB, Bytes
from vmckpt_lab.debian.image import DebianImage
from vmckpt_lab.plan import GUEST_BRIDGE

# The newest Debian that the osinfo-db of Debian 12 knows; Debian 12 would get the same devices.
_VARIANT = "debian11"


@dataclass(frozen=True, slots=True, kw_only=True)
class DebianGuest:
    """The properties of a Debian guest."""

    name: str
    memory: Bytes
    vcpus: int
    disk: Path
    disk_format: str
    addresses: tuple[str, ...]
    """IPv4 addresses, one for each NIC."""
    uefi: bool = False
    tpm: bool = False


def mac(address: str) -> str:
    """Return the MAC address of the NIC with this IPv4 address."""
    return "52:54:00:" + ":".join(f"{int(part):02x}" for part in address.split(".")[1:])


def kernel_line(name: str, addresses: tuple[str, ...]) -> str:
    """Return the kernel command line. systemd-network-generator reads the addresses from it."""
    # virt-install puts each NIC behind a PCIe root port of its own, beginning with the first.
    cards = " ".join(
        f"ip={address}:::255.255.255.0::enp{number}s0:none"
        for number, address in enumerate(addresses, start=1)
    )
    # For pti=on, see docs/adr/0005-tcg-lost-writes.md.
    return f"root=/dev/vda rw console=ttyS0 quiet pti=on systemd.hostname={name} {cards}"


def command(guest: DebianGuest, booted: DebianImage) -> list[str]:
    """Return the virt-install command that prints the guest's definition."""
    line = kernel_line(guest.name, guest.addresses)
    boot = f"kernel={booted.kernel},initrd={booted.initrd},kernel_args={line}"
    words = [
        "virt-install", "--connect", "qemu:///system", "--print-xml", "--import",
        "--virt-type", "qemu", "--os-variant", _VARIANT, "--name", guest.name,
        "--memory", str(guest.memory // MIB), "--vcpus", str(guest.vcpus),
        "--disk", f"path={guest.disk},format={guest.disk_format}",
        "--boot", f"uefi,{boot}" if guest.uefi else boot,
        # virt-install gives each guest with UEFI a TPM unless told otherwise.
        "--tpm", "model=tpm-crb,backend.type=emulator" if guest.tpm else "none",
    ]  # fmt: skip
    for address in guest.addresses:
        words += ["--network", f"bridge={GUEST_BRIDGE},mac={mac(address)}"]
    return words
