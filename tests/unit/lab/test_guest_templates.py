"""Which lab guests start from one template."""

from pathlib import Path
from typing import Any

import pytest

from vmckpt.units import Bytes, BytesPerSecond
from vmckpt_lab import guest_image, guest_templates, guests
from vmckpt_lab.plan import LabPlan

LAB = LabPlan(name="t1", subnet=7, host_count=2)
BOOTED = guest_image.Image(Path("/cache/vmlinuz"), Path("/cache/initramfs-1.cpio"))


def template(lab: LabPlan = LAB, booted: guest_image.Image = BOOTED, **other: Any) -> str:
    usual: dict[str, Any] = {
        "name": "web1", "address": lab.guest_address(0), "memory": Bytes(256 << 20), "vcpus": 1,
        "dirty": Bytes(64 << 20), "dirty_rate": BytesPerSecond(20 << 20), "disk": Bytes(64 << 20),
        "disk_format": "raw", "disk_path": "/shared/web1.raw", "private_disk": False,
        "shared_memory": False,
    }  # fmt: skip
    guest = guests.LabGuest(**(usual | other))
    return guest_templates.generalised(guests.domain_xml(lab, guest, booted))


@pytest.mark.parametrize(
    "other",
    [
        {"name": "web2", "address": LAB.guest_address(1)},
        {"disk_format": "qcow2", "disk_path": "/private/web1.qcow2", "private_disk": True},
        {"dirty_rate": BytesPerSecond(0)},
        {"seed": 5, "chat": 3},
        {"lab": LabPlan(name="t2", subnet=8, host_count=3)},
    ],
)
def test_guests_that_differ_in_settings_and_paths_share_one(other: dict[str, Any]) -> None:
    assert template(**other) == template()


@pytest.mark.parametrize(
    "other",
    [
        {"memory": Bytes(128 << 20)},
        {"vcpus": 2},
        {"disk": Bytes(0)},
        {"shared_memory": True},
        {"dirty": Bytes(32 << 20)},
        {"booted": guest_image.Image(Path("/cache/vmlinuz"), Path("/cache/initramfs-2.cpio"))},
    ],
)
def test_guests_with_other_hardware_memory_or_image_do_not(other: dict[str, Any]) -> None:
    assert template(**other) != template()


def test_a_template_waits_and_has_no_settings_of_a_guest() -> None:
    made = template()
    assert "VMC_TEMPLATE=1" in made
    assert "pti=on" in made
    assert "VMC_ADDRESS" not in made
    assert "VMC_SEED" not in made
