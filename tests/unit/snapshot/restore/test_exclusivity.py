"""A guest never runs twice, and a fork writes into nothing of the original's."""

from xml.etree import ElementTree as ET

import pytest

from tests.support.guest_xml import XML
from vmckpt.errors import BadInput, GuestLocked, HostUnreachable, VmckptError
from vmckpt.hypervisor import storage
from vmckpt.hypervisor.storage import User
from vmckpt.snapshot.restore import domain_xml, exclusivity
from vmckpt.snapshot.restore.exclusivity import HostAnswer

IMAGE = "/s/web1.qcow2"
HERE, RUNS_HERE = HostAnswer(host="alpha", users={}), HostAnswer(host="alpha", runs=True, users={})
THERE = HostAnswer(host="beta", users={"/s/web2.qcow2": User("web2", "qcow2")})


@pytest.mark.parametrize(
    ("heard", "error", "said"),
    [
        ([HERE, THERE], None, ""),
        ([RUNS_HERE, THERE], None, ""),  # whether it may be ended is asked elsewhere
        ([HERE, HostAnswer(host="beta", runs=True, users={})], GuestLocked,
         "web1 is running or paused on beta"),
        ([HERE, HostAnswer(host="beta", error="off")], HostUnreachable, "does not answer: beta"),
        ([HostAnswer(host="alpha", users={IMAGE: User("new", "qcow2")}), THERE], GuestLocked,
         "/s/web1.qcow2 is also an image of guest new on alpha"),
        ([HERE, HostAnswer(host="beta", users={IMAGE: User("new", "raw")})], GuestLocked,
         "new on beta"),
    ],
)  # fmt: skip
def test_a_guests_old_place_is_its_own(
    heard: list[HostAnswer], error: type[VmckptError] | None, said: str
) -> None:
    if error is None:
        exclusivity.require_exclusive(heard, "alpha", "web1", [IMAGE])
        return
    with pytest.raises(error, match=said):
        exclusivity.require_exclusive(heard, "alpha", "web1", [IMAGE])


def test_images_are_those_of_disks_with_all_below_them_and_the_nvram() -> None:
    xml = XML.replace(
        "<backingStore type='file'/>",
        "<backingStore type='file'><format type='qcow2'/><source file='/s/base.qcow2'/>"
        "<backingStore type='file'><source file='/s/root.raw'/></backingStore></backingStore>",
    ).replace("</os>", "<nvram>/v/web1.fd</nvram></os>")
    assert storage.images_in(xml) == {
        IMAGE: "qcow2", "/s/base.qcow2": "", "/s/root.raw": "", "/v/web1.fd": "",
    }  # fmt: skip


BLOCK = XML.replace("type='file' device='disk'", "type='block' device='disk'").replace(
    f"file='{IMAGE}'", "dev='/dev/vg/web1'"
)


@pytest.mark.parametrize(
    ("xml", "said"),
    [
        (BLOCK, r"disk vda is of type block \(/dev/vg/web1\), which vmckpt cannot restore"),
        (XML.replace(f"file='{IMAGE}'", "pool='p' volume='v'").replace("'file' device='disk'",
         "'volume' device='disk'"), "of type volume"),
        (XML.replace(f"<source file='{IMAGE}'/>",
         f"<source file='{IMAGE}'><encryption format='luks'/></source>"), "encrypted by QEMU"),
        (XML.replace(f"<source file='{IMAGE}'/>",
         f"<source file='{IMAGE}'><slices/></source>"), "a slice"),
    ],
)  # fmt: skip
def test_a_disk_that_is_no_image_is_refused_by_name(xml: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        domain_xml.image_of(xml, "vda")
    with pytest.raises(ValueError, match="disk vda"):
        domain_xml.xml_for_replace(xml, {"vda": "/s/other"})


def test_a_fork_keeps_nothing_of_the_originals_image() -> None:
    xml = XML.replace(f"file='{IMAGE}'", f"file='{IMAGE}' dev='/dev/vg/web1' index='1'")
    source = ET.fromstring(domain_xml.xml_for_replace(xml, {"vda": "/s/fork"})).find(
        "devices/disk/source"
    )
    assert source is not None
    assert source.attrib == {"file": "/s/fork"}


def with_device(device: str) -> str:
    return XML.replace("</devices>", f"{device}</devices>")


SHARED = with_device(
    "<disk type='file' device='disk'><source file='/s/data'/><target dev='vdb' bus='virtio'/>"
    "<shareable/></disk>"
)
LUN = with_device(
    "<disk type='block' device='lun'><source dev='/dev/sdx'/><target dev='sdb' bus='scsi'/></disk>"
)
IDE = with_device(
    "<disk type='file' device='disk'><source file='/s/x'/><target dev='hda' bus='ide'/></disk>"
)
VIRTIOFS = with_device(
    "<filesystem type='mount'><driver type='virtiofs'/><source dir='/srv/data'/></filesystem>"
)
NINE_P = with_device("<filesystem type='mount'><source dir='/srv/data'/></filesystem>")
TPM_ELSEWHERE = "<tpm><backend type='emulator'><source type='dir' path='/srv/tpm'/></backend></tpm>"
NVRAM_ELSEWHERE = "<nvram type='block'><source dev='/dev/vg/vars'/></nvram>"
USB = with_device("<hostdev mode='subsystem' type='usb'/>")


def drive(kind: str, source: str, target: str = "sda") -> str:
    return f"<disk type='file' device='{kind}'><source {source}/><target dev='{target}'/></disk>"


def test_a_cd_must_be_there_unless_the_guest_starts_without() -> None:
    xml = with_device(
        drive("cdrom", "file='/iso/debian.iso'") + drive("disk", "file='/s/data'", "vdb")
        + drive("cdrom", "file='/iso/tools.iso' startupPolicy='optional'", "sdb")
        + "<disk type='file' device='cdrom'><target dev='sdc'/></disk>"
    )  # fmt: skip
    assert domain_xml.drives(xml) == {"sda": "/iso/debian.iso"}


@pytest.mark.parametrize(
    ("xml", "said", "able"),
    [
        (XML, "", True),
        (SHARED, "disk vdb (/s/data)", True),
        (NINE_P, "the shared directory /srv/data", True),
        (LUN, "disk sdb (/dev/sdx)", False),
        (IDE, "disk hda (/s/x)", False),
        (VIRTIOFS, "the shared directory /srv/data", False),
        (USB, "the host's usb device", False),
        (with_device("<shmem name='s'/>"), "the shared memory s", False),
        (with_device("<tpm><backend type='passthrough'/></tpm>"), "the host's TPM", False),
        (with_device("<tpm><backend type='emulator'/></tpm>"), "", True),
        (with_device(TPM_ELSEWHERE), "the TPM's state in /srv/tpm", False),
        (XML.replace("</os>", f"{NVRAM_ELSEWHERE}</os>"), "the NVRAM on a block disk", False),
    ],
)
def test_a_fork_writes_into_nothing_it_shares(xml: str, said: str, able: bool) -> None:
    assert domain_xml.beside(xml, {"vda"}) == ((said,) if said else ())
    if able:
        changed, told = domain_xml.unshared(xml, {"vda"}, memory=True)
        assert len(ET.fromstring(changed).findall("devices/*/readonly")) == bool(said)
        assert told == ((f"{said} is read-only for the fork",) if said else ())
    else:
        with pytest.raises(BadInput, match="a fork would write to it"):
            domain_xml.unshared(xml, {"vda"}, memory=True)
        changed, told = domain_xml.unshared(xml, {"vda"}, memory=False)
        assert told == (f"{said} was removed from the fork",)
    assert domain_xml.beside(changed, {"vda"}) == ()


def test_a_shared_disk_can_be_read_beside_the_guest_that_writes_it() -> None:
    """QEMU has a lock for writing on it, and lets others read it only if they permit a writer."""
    changed, _ = domain_xml.unshared(SHARED, {"vda"}, memory=True)
    disk = ET.fromstring(changed).findall("devices/disk")[-1]
    assert [node.tag for node in disk if node.tag in ("shareable", "readonly")] == [
        "shareable", "readonly",
    ]  # fmt: skip
    qcow2 = SHARED.replace("<source file='/s/data'/>", "<driver type='qcow2'/><source file='/s'/>")
    changed, _ = domain_xml.unshared(qcow2, {"vda"}, memory=True)
    assert "shareable" not in changed, "libvirt refuses it"
