from xml.etree import ElementTree as ET

import pytest

from tests.support import foreign
from vmckpt.definition.unmigratable import refusals

REFUSED = {
    "preflight-disk-transient": ("disk-transient", False),
    "preflight-shmem-ivshmem": ("shmem", False),
    "preflight-shmem-ivshmem-plain-peer": ("shmem", True),
    "preflight-invtsc-without-frequency": ("invtsc", True),
    "preflight-nic-vdpa": ("nic-vdpa", True),
    "preflight-sev": ("launch-security", True),
    "preflight-sev-snp": ("launch-security", True),
    "preflight-tdx": ("launch-security", True),
    "preflight-video-virgl-3d": ("video-3d", True),
    "preflight-input-passthrough": ("input-passthrough", True),
    "preflight-tpm-passthrough": ("tpm-passthrough", True),
}


@pytest.mark.parametrize(("name", "wanted"), REFUSED.items())
def test_a_guest_that_cannot_migrate_anywhere_is_told_why(
    name: str, wanted: tuple[str, bool]
) -> None:
    (found,) = refusals(foreign.root(name))

    assert (found.code, found.by_qemu) == wanted
    assert found.what
    assert found.hint


ALLOWED = [
    "<devices><shmem name='s' role='master'><model type='ivshmem-plain'/></shmem></devices>",
    "<cpu><feature policy='require' name='invtsc'/></cpu>"
    "<clock><timer name='tsc' frequency='2600000000'/></clock>",
    "<cpu><feature policy='disable' name='invtsc'/></cpu>",
    "<devices><video><model type='virtio'><acceleration accel3d='no'/></model></video></devices>",
    "<devices><disk type='dir' device='floppy'><source dir='/d'/><readonly/></disk></devices>",
    "<devices><filesystem type='mount'><source dir='/d'/><target dir='t'/></filesystem></devices>",
]


@pytest.mark.parametrize("xml", ALLOWED)
def test_what_libvirt_and_qemu_migrate_is_not_refused(xml: str) -> None:
    assert refusals(ET.fromstring(f"<domain type='kvm'>{xml}</domain>")) == ()


def test_virtiofs_and_writable_directories_are_refused() -> None:
    xml = """<domain><devices>
    <filesystem type='mount'><driver type='virtiofs'/><target dir='t'/></filesystem>
    <disk type='dir' device='floppy'><source dir='/d'/><target dev='fda'/></disk>
    </devices></domain>"""
    assert [one.code for one in refusals(ET.fromstring(xml))] == ["host-device", "disk-directory"]
