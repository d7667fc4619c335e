"""Metadata in an edited definition stays exactly as it was."""

from xml.etree import ElementTree as ET

import pytest

from vmckpt.capture import firmware
from vmckpt.hypervisor import definition_text, storage
from vmckpt.replication.backup import standby_xml
from vmckpt.snapshot.restore import domain_xml as restore_xml

VIRT_INSTALL = """<libosinfo:libosinfo xmlns:libosinfo="http://libosinfo.org/xmlns/libvirt/domain/1.0">
      <libosinfo:os id="http://debian.org/debian/12"/>
    </libosinfo:libosinfo>"""
COCKPIT = """<cockpit_machines:data xmlns:cockpit_machines="https://cockpit/machines">
      <cockpit_machines:has_install_phase>false</cockpit_machines:has_install_phase>
    </cockpit_machines:data>"""
DEFAULT = """<info xmlns='urn:of:a:tool' said="a > b"><!-- kept -->\u00e9<empty/></info>"""
NESTED = """<o:vm xmlns:o="http://ovirt.org/vm/1.0"><p:q xmlns:p="urn:p" p:r="1"/>
      <metadata/></o:vm>"""
DOMAIN = """<domain type='kvm'><name>web1</name><uuid>4e1d7ee7-9a39-4bb7-9a10-3c0d5a7a5b9e</uuid>
  <metadata>
    {}
  </metadata>
  <os><nvram>/n/web1_VARS.fd</nvram></os>
  <devices><disk type='file' device='disk'><source file='/i/a'/><target dev='vda'/></disk></devices>
</domain>"""
ENTRIES = [VIRT_INSTALL, COCKPIT, DEFAULT, NESTED]


def with_metadata(*entries: str) -> str:
    return DOMAIN.format("\n    ".join(entries))


@pytest.mark.parametrize("entry", [*ENTRIES, "".join(ENTRIES), "<a:e xmlns:a='u'/>"])
def test_metadata_is_not_rewritten(entry: str) -> None:
    xml = with_metadata(entry)
    root = ET.fromstring(xml)
    ET.SubElement(root, "genid")
    found = definition_text.text(root, xml)

    assert entry in found
    assert ET.fromstring(found).find("genid") is not None


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_edited_definition_keeps_it(entry: str) -> None:
    xml = with_metadata(entry)
    images = {"vda": "/new/a"}
    edited = [
        storage.with_images_at(xml, images),
        standby_xml.standby(xml, images, "session"),
        standby_xml.clean(xml, images),
        standby_xml.with_owners_kept(xml, ["vda"]),
        firmware.own_nvram(xml, "other"),
        restore_xml.xml_for_replace(xml, images),
        restore_xml.xml_for_fork(
            xml, images, name="b", uuid="5e1d7ee7-9a39-4bb7-9a10-3c0d5a7a5b9e", macs=[],
            link_up=False,
        ),
    ]  # fmt: skip
    for one in edited:
        assert one != xml
        assert entry in one


def test_a_standbys_mark_is_removed_and_the_rest_kept() -> None:
    standby = standby_xml.standby(with_metadata(VIRT_INSTALL), {}, "session")
    clean = standby_xml.clean(standby, {})

    assert standby_xml.marked(standby) == "session"
    assert standby_xml.marked(clean) is None
    assert VIRT_INSTALL in standby
    assert VIRT_INSTALL in clean


def test_an_edited_entry_is_not_put_back() -> None:
    xml = with_metadata("<a:e xmlns:a='urn:a'><a:f/></a:e>", "<kept0. /><b/>")
    root = ET.fromstring(xml)
    root.findall("metadata/*/*")[0].set("new", "1")
    found = ET.fromstring(definition_text.text(root, xml))

    assert ET.canonicalize(ET.tostring(found)) == ET.canonicalize(ET.tostring(root))


def test_a_prefix_declared_outside_stays_valid() -> None:
    xml = with_metadata("<o:e/>").replace("<domain", "<domain xmlns:o='urn:o'")
    root = ET.fromstring(xml)
    found = ET.fromstring(definition_text.text(root, xml))

    assert found.find("metadata/{urn:o}e") is not None
