"""The words for virt-install, which writes the definition of a Debian guest."""

from pathlib import Path
from typing import Any

from vmckpt.units import MIB, Bytes
from vmckpt_lab.debian.definition import DebianGuest, command, kernel_line, mac
from vmckpt_lab.debian.image import DebianImage

BOOTED = DebianImage(Path("/c/disk.qcow2"), Path("/c/vmlinuz"), Path("/c/initrd.img"))


def options(**other: Any) -> list[tuple[str, str]]:
    usual: dict[str, Any] = {
        "name": "db1", "memory": Bytes(640 * MIB), "vcpus": 2, "disk": Path("/s/db1.qcow2"),
        "disk_format": "qcow2", "addresses": ("198.19.7.100",),
    }  # fmt: skip
    words = command(DebianGuest(**(usual | other)), BOOTED)
    return [(word, words[at + 1]) for at, word in enumerate(words[:-1]) if word.startswith("--")]


def test_virt_install_prints_a_definition_with_the_values_asked_for() -> None:
    told = dict(options())
    assert told["--memory"] == "640"
    assert told["--vcpus"] == "2"
    assert told["--disk"] == "path=/s/db1.qcow2,format=qcow2"
    assert told["--tpm"] == "none"
    assert told["--boot"].startswith("kernel=/c/vmlinuz,initrd=/c/initrd.img,kernel_args=")
    assert "--print-xml" in told


def test_firmware_and_a_tpm_are_there_only_on_demand() -> None:
    assert dict(options(uefi=True))["--boot"].startswith("uefi,kernel=")
    assert dict(options(tpm=True))["--tpm"] == "model=tpm-crb,backend.type=emulator"


def test_each_card_has_its_address() -> None:
    both = ("198.19.7.100", "198.19.7.101")
    cards = [value for option, value in options(addresses=both) if option == "--network"]
    assert cards == [f"bridge=guests,mac={mac(one)}" for one in both]
    line = kernel_line("db1", both)
    assert "ip=198.19.7.100:::255.255.255.0::enp1s0:none" in line
    assert "ip=198.19.7.101:::255.255.255.0::enp2s0:none" in line
    assert "," not in line  # virt-install would take what follows for an option
    assert "pti=on" in line.split()


def test_the_card_of_an_address_has_one_hardware_address() -> None:
    assert mac("198.19.7.100") == "52:54:00:13:07:64"
