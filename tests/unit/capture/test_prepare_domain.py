"""What a definition lacks, what of it needs a restart, and what stays as it is."""

from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from vmckpt.capture import prepare_domain as room
from vmckpt.capture.prepare_domain import Prepared
from vmckpt.model.disk import DiskFacts
from vmckpt.model.finding import Severity

BARE = """<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>web1</name><uuid>0d3f</uuid>
  <metadata><v:labels xmlns:v='urn:vmckpt:labels:1'><v:label name='a' value='b'/></v:labels>
  </metadata>
  <memory unit='KiB'>262144</memory><currentMemory unit='KiB'>262144</currentMemory>
  <devices>
    <interface type='bridge'><mac address='52:54:00:00:00:01'/><source bridge='br0'/>
      <model type='virtio'/></interface>
    <interface type='network'><source network='default'/><model type='e1000'/></interface>
  </devices>
  <qemu:commandline><qemu:arg value='-x'/></qemu:commandline>
</domain>"""
GOOD = """<domain type='kvm'><name>web1</name><genid>77ff</genid>
  <memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>
  <devices><interface type='bridge'><model type='virtio'/><driver name='qemu'/>
  </interface></devices></domain>"""
DISK = DiskFacts(
    name="vda", kind="file", device="disk", format="qcow2", source="/i/a.qcow2", version=3
)


def prepare(
    stored: str, running: str | None, disks: Sequence[DiskFacts] = (), *, finds_writes: bool = False
) -> Prepared:
    live = ET.fromstring(running) if running is not None else None
    return room.prepare(stored, live, disks, finds_writes=finds_writes)


def told(found: Prepared) -> dict[str, Severity]:
    return {finding.code: finding.severity for finding in found.findings}


def test_all_that_is_lacking_is_added_and_nothing_else_touched() -> None:
    found = prepare(BARE, None)
    assert found.xml is not None
    root, before = ET.fromstring(found.xml), ET.fromstring(BARE)

    source, access = root.find("memoryBacking/source"), root.find("memoryBacking/access")
    assert source is not None
    assert access is not None
    assert (source.attrib, access.attrib) == ({"type": "file"}, {"mode": "shared"})
    assert [node.tag for node in root][:3] == ["name", "uuid", "genid"]
    drivers = [card.find("driver") for card in root.findall("devices/interface")]
    assert drivers[0] is not None
    assert (drivers[0].attrib, drivers[1]) == ({"name": "qemu"}, None)
    for node in (root.find("genid"), root.find("memoryBacking")):
        assert node is not None
        root.remove(node)
    root.findall("devices/interface")[0].remove(drivers[0])
    assert ET.canonicalize(ET.tostring(root), strip_text=True) == ET.canonicalize(
        ET.tostring(before), strip_text=True
    )
    assert not found.restart
    assert told(found).pop("network-queues") is Severity.OK
    assert set(told(found).values()) == {Severity.WARNING, Severity.INFO, Severity.OK}


def test_what_is_as_it_should_be_stays() -> None:
    found = prepare(GOOD, GOOD, [DISK])

    assert (found.xml, found.restart) == (None, False)
    assert told(found) == {
        "memory": Severity.OK, "memory-folder": Severity.INFO, "vmgenid": Severity.OK,
        "network-driver": Severity.OK, "network-queues": Severity.OK,
        "disk-bitmaps": Severity.OK,
    }  # fmt: skip


def test_twice_is_once() -> None:
    once = prepare(BARE, None).xml
    assert once is not None

    assert prepare(once, None).xml is None


@pytest.mark.parametrize(
    ("stored", "running", "changes", "restart"),
    [
        pytest.param(BARE, BARE, True, True, id="neither"),
        pytest.param(GOOD, BARE, False, True, id="not-restarted-yet"),
        pytest.param(BARE, GOOD, True, False, id="only-the-running-one"),
        pytest.param(BARE, None, True, False, id="off"),
    ],
)
def test_a_restart_is_asked_for_where_the_running_guest_lacks_it(
    stored: str, running: str | None, changes: bool, restart: bool
) -> None:
    found = prepare(stored, running)

    assert (found.xml is not None, found.restart) == (changes, restart)
    mends = {
        f.hint for f in found.findings
        if f.severity is Severity.WARNING and f.code != "network-unplugged"
    } - {None}  # fmt: skip
    assert bool(mends) == restart
    if restart:
        again = "shut web1 down and start it again (a reboot is not enough)"
        live = {f"run vmckpt prepare web1 --live, or {again}"}
        assert {again} <= mends <= {again} | live


@pytest.mark.parametrize(
    ("memory", "source", "changes"),
    [
        pytest.param("<source type='memfd'/><access mode='shared'/>", "file", True, id="memfd"),
        pytest.param("<source type='file'/>", "file", True, id="private-file"),
        pytest.param("<hugepages/>", None, True, id="huge-pages"),
        pytest.param("<hugepages/><access mode='shared'/>", None, False, id="shared-huge-pages"),
        pytest.param("<nosharepages/>", "file", True, id="other"),
    ],
)
def test_memory_becomes_a_shared_file(memory: str, source: str | None, changes: bool) -> None:
    stored = GOOD.replace("<source type='file'/><access mode='shared'/>", memory)
    found = prepare(stored, None)
    assert (found.xml is not None) == changes
    root = ET.fromstring(found.xml or stored)
    node, access = root.find("memoryBacking/source"), root.find("memoryBacking/access")

    assert (None if node is None else node.get("type")) == source
    assert access is not None
    assert access.get("mode") == "shared"


@pytest.mark.parametrize("running", [None, BARE, GOOD])
def test_memory_stays_private_if_the_host_finds_written_pages(running: str | None) -> None:
    found = prepare(BARE, running, finds_writes=True)
    (memory,) = (one for one in found.findings if one.code == "memory")

    assert memory.severity is Severity.OK
    assert "may stay private" in memory.text
    assert "memoryBacking" not in (found.xml or "")
    assert found.restart == (running == BARE)
    ready = GOOD.replace("<source type='file'/><access mode='shared'/>", "")
    assert not prepare(ready, ready, finds_writes=True).restart


def test_shared_memory_stays_shared() -> None:
    found = prepare(GOOD, GOOD, finds_writes=True)

    assert (found.xml, found.restart) == (None, False)
    assert [one.text for one in found.findings if one.code == "memory"] == [
        "its memory is a file that other processes can map"
    ]


def test_numa_cells_are_shared_too() -> None:
    cell = "<cpu><numa><cell id='0' memory='1' memAccess='private'/></numa></cpu></domain>"
    found = prepare(GOOD.replace("</domain>", cell), None)

    assert found.xml is not None
    assert 'memAccess="shared"' in found.xml


@pytest.mark.parametrize(
    ("domain", "card", "changes"),
    [
        pytest.param("kvm", "<model type='virtio'/>", True, id="kvm"),
        pytest.param("kvm", "<model type='virtio-transitional'/>", True, id="transitional"),
        pytest.param("kvm", "<model type='virtio'/><driver name='vhost'/>", True, id="explicit"),
        pytest.param("kvm", "<model type='virtio'/><driver name='qemu'/>", False, id="qemu"),
        pytest.param("kvm", "<model type='e1000'/>", False, id="not-virtio"),
        pytest.param("qemu", "<model type='virtio'/>", False, id="tcg"),
        pytest.param("qemu", "<model type='virtio'/><driver name='vhost'/>", False, id="ignored"),
    ],
)
def test_only_virtio_cards_under_kvm_have_vhost(domain: str, card: str, changes: bool) -> None:
    stored = GOOD.replace("<model type='virtio'/><driver name='qemu'/>", card)
    found = prepare(stored.replace("type='kvm'", f"type='{domain}'"), None)

    assert (found.xml is not None) == changes
    expected = Severity.WARNING if changes else Severity.OK
    assert told(found)["network-driver"] is expected


@pytest.mark.parametrize(
    ("domain", "card", "queues"),
    [
        pytest.param("kvm", "<driver name='qemu' queues='4'/>", True, id="kvm"),
        pytest.param("qemu", "<driver queues='2' rx_queue_size='512'/>", True, id="tcg"),
        pytest.param("qemu", "<driver queues='1'/>", False, id="a-single-queue"),
    ],
)
def test_a_card_keeps_a_single_queue(domain: str, card: str, queues: bool) -> None:
    stored = GOOD.replace("<driver name='qemu'/>", card).replace("'kvm'", f"'{domain}'")
    found = prepare(stored, stored)
    (one,) = (finding for finding in found.findings if finding.code == "network-queues")

    assert (found.xml is not None, found.restart) == (queues, queues)
    assert one.severity is (Severity.WARNING if queues else Severity.OK)
    if queues:
        assert "queues=" not in str(found.xml)
        assert ("rx_queue_size" in card) == ("rx_queue_size" in str(found.xml))
        assert "prepare web1 --live" in str(one.hint)


def test_a_card_that_is_not_plugged_in_is_told_of() -> None:
    running = GOOD.replace("<interface type='bridge'>", "<interface type='user'>")
    card = "<interface type='bridge'><mac address='52:54:00:00:00:09'/></interface>"
    stored = GOOD.replace("<devices>", f"<devices>{card}")
    (told,) = (one for one in prepare(stored, running).findings if one.code == "network-unplugged")
    assert told.text.startswith("network card 52:54:00:00:00:09 is in its definition")
    for live in (stored, None):
        assert "network-unplugged" not in [one.code for one in prepare(stored, live).findings]


def test_a_card_of_qemus_own_network_has_no_vhost() -> None:
    stored = GOOD.replace("<driver name='qemu'/>", "").replace("'bridge'", "'user'")

    assert prepare(stored, None).xml is None


@pytest.mark.parametrize(("kind", "says"), [("tpm", "its TPM"), ("vsock", "its vsock device")])
def test_a_device_with_which_protect_refuses_the_guest_is_told_of(kind: str, says: str) -> None:
    found = prepare(GOOD.replace("<devices>", f"<devices><{kind}/>"), None)
    (one,) = (finding for finding in found.findings if finding.code == f"device-{kind}")

    assert found.xml is None
    assert one.text.startswith(f"{says} has state that cannot be replicated")
    assert one.severity is Severity.WARNING
    assert one.hint


def test_metadata_keeps_its_prefixes() -> None:
    entry = (
        '<libosinfo:libosinfo xmlns:libosinfo="http://libosinfo.org/xmlns/libvirt/domain/1.0">'
        '<libosinfo:os id="http://debian.org/debian/12"/></libosinfo:libosinfo>'
    )
    found = prepare(BARE.replace("<metadata>", f"<metadata>{entry}"), None)

    assert found.xml is not None
    assert entry in found.xml


def test_a_card_that_passes_qemu_by_is_told_of() -> None:
    card = (
        "<interface type='vhostuser'><mac address='52:54:00:9'/><model type='virtio'/></interface>"
    )
    stored = GOOD.replace("<devices>", f"<devices>{card}")
    found = prepare(stored, None)

    assert found.xml is None
    assert told(found)["network-outside"] is Severity.WARNING
    assert any("52:54:00:9 (vhostuser)" in finding.text for finding in found.findings)


@pytest.mark.parametrize(
    ("disk", "severity", "hint"),
    [
        pytest.param(DISK, Severity.OK, None, id="qcow2"),
        pytest.param(replace(DISK, version=2), Severity.WARNING, "compat=1.1", id="old"),
        pytest.param(replace(DISK, format="raw"), Severity.WARNING, "convert", id="raw"),
        pytest.param(
            replace(DISK, format="raw", kind="network"), Severity.WARNING, None, id="network"
        ),
        pytest.param(replace(DISK, device="cdrom"), None, None, id="cdrom"),
        pytest.param(replace(DISK, read_only=True), None, None, id="read-only"),
    ],
)
def test_images_are_only_told_of(
    disk: DiskFacts, severity: Severity | None, hint: str | None
) -> None:
    found = prepare(GOOD, GOOD, [disk])
    mends = [finding.hint for finding in found.findings if finding.code == "disk-bitmaps"]

    assert found.xml is None
    assert told(found).get("disk-bitmaps") == severity
    assert [one for one in mends if one] == [] if hint is None else hint in str(mends)
