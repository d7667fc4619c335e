"""What a restored guest is started as, and which definition is stored of it."""

from uuid import UUID
from xml.etree import ElementTree as ET

import pytest

from tests.support.guest_xml import XML
from vmckpt.hypervisor import hardware, qemu_user
from vmckpt.snapshot.restore import domain_xml

FORK = domain_xml.xml_for_fork(
    XML, {"vda": "/s/fork-vda.qcow2"}, name="fork", uuid="u-1", macs=["52:54:00:00:00:02"],
    link_up=False,
)  # fmt: skip


def test_a_fork_gets_a_new_generation_id_and_keeps_its_clock() -> None:
    root, before = ET.fromstring(FORK), ET.fromstring(XML)
    new, old = root.findtext("genid"), before.findtext("genid")
    assert new is not None
    assert str(UUID(new)) != old
    clock = root.find("clock")
    assert clock is not None
    assert clock.attrib == {"offset": "utc"}
    assert (root.findtext("name"), root.get("id")) == ("fork", None)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ((" ", " "), ()),
        # What only a stored definition has, or libvirt fills in by itself, is no difference.
        (("<cpu mode='custom'><model>qemu64</model></cpu>", "<cpu mode='host-model'/>"), ()),
        (("<source network='default' bridge='virbr0'/>", "<source network='default'/>"), ()),
        (("<clock", "<on_reboot>restart</on_reboot><clock"), ()),
        (("/s/web1.qcow2", "/t/web1.qcow2"), ("disk vda",)),
        (("'qcow2'", "'raw'"), ("disk vda",)),
        (("196608", "393216"), ("memory",)),
        (("<vcpu>2", "<vcpu>4"), ("processors",)),
        (("pc-i440fx-7.2", "pc-i440fx-9.0"), ("machine",)),
        (("00:00:01", "00:00:09"), ("network card 0",)),
        (("<clock", "<devices2/><clock"), ()),
        (("  </devices>", "<tpm model='tpm-crb'/></devices>"), ("tpm",)),
    ],
)
def test_a_stored_definition_gives_way_only_to_other_hardware(
    change: tuple[str, str], parts: tuple[str, ...]
) -> None:
    stored = XML.replace(*change)
    assert hardware.differs(stored, XML) == parts
    assert domain_xml.wanted(stored, XML) == (XML if parts else None)


def test_a_definition_that_is_missing_is_made() -> None:
    assert domain_xml.wanted(None, XML) == XML


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("<secmodel><model>dac</model><baselabel type='kvm'>+64055:+108</baselabel></secmodel>",
         (64055, 108)),
        ("<secmodel><model>apparmor</model></secmodel>", (0, 0)),
        ("", (0, 0)),
    ],
)  # fmt: skip
def test_qemus_user_is_in_libvirts_capabilities(model: str, found: tuple[int, int]) -> None:
    assert qemu_user.owner_in(f"<capabilities><host>{model}</host></capabilities>") == found
