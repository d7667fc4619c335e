"""Which network cards use vhost, and what is said of devices that cannot be replicated."""

from xml.etree import ElementTree as ET

import pytest

from tests.support import foreign
from vmckpt.capture import device_limits
from vmckpt.capture.device_limits import NOT_REPLICATED, wants_vhost


def test_only_what_qemu_refuses_keeps_a_state_from_being_saved() -> None:
    found = device_limits.unsaved(foreign.root("preflight-video-virgl-3d"))

    assert found is not None
    assert found.code == "video-3d"
    assert device_limits.unsaved(foreign.root("preflight-disk-transient")) is None


@pytest.mark.parametrize(
    ("kind", "model", "driver", "vhost"),
    [
        ("bridge", "virtio", None, True),
        ("network", "virtio-non-transitional", "vhost", True),
        ("direct", "virtio", None, True),
        ("bridge", "virtio", "qemu", False),
        ("bridge", "e1000e", None, False),
        ("bridge", None, None, False),
        ("user", "virtio", None, False),
    ],
)
def test_which_cards_libvirt_gives_to_vhost(
    kind: str, model: str | None, driver: str | None, vhost: bool
) -> None:
    assert wants_vhost(kind, model, driver) is vhost


def test_usb_redirection_by_spice_is_no_obstacle() -> None:
    spice, tcp = "<redirdev bus='usb' type='spicevmc'/>", "<redirdev bus='usb' type='tcp'/>"
    for text, found in ((spice, ()), (tcp, ("redirdev",)), (spice + tcp, ("redirdev",))):
        root = ET.fromstring(f"<domain><devices>{text}<disk/></devices></domain>")
        assert device_limits.kinds(root) == (*found, "disk")


@pytest.mark.parametrize("kind", NOT_REPLICATED)
def test_every_such_device_has_a_reason_and_a_hint(kind: str) -> None:
    text, hint = device_limits.not_replicated(kind, "web1")

    assert "cannot be replicated" in text
    assert hint
    assert ("virsh edit web1" in hint) == (kind == "tpm")
