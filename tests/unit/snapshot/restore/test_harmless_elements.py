"""Elements of a definition that reach nothing of the host; all others are named."""

from xml.etree import ElementTree as ET

import pytest

from vmckpt.snapshot.restore import harmless_elements

NOTHING: frozenset[str] = frozenset()


def domain(inside: str, kind: str = "kvm") -> ET.Element:
    return ET.fromstring(f"<domain type='{kind}'><name>web1</name>{inside}</domain>")


def devices(inside: str) -> ET.Element:
    return domain(f"<devices>{inside}</devices>")


@pytest.mark.parametrize(
    "inside",
    [
        "<memballoon model='virtio'><stats period='5'/></memballoon>",
        "<disk type='file' device='disk'><source file='/i/a'/><target dev='vda'/></disk>",
        "<disk type='file'><source file='/i/a'/><backingStore type='file'><source file='/i/b'/>"
        "<backingStore type='file'><format type='raw'/></backingStore></backingStore></disk>",
        "<interface type='bridge'><source bridge='br0'/><model type='virtio'/></interface>",
        "<serial type='pty'><source path='/dev/pts/3'/></serial>",
    ],
)
def test_what_guests_usually_have_is_known(inside: str) -> None:
    assert list(harmless_elements.unknown(devices(inside), but=NOTHING)) == []


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        ("<teleport/>", "<devices/teleport> is not known to be harmless"),
        ("<disk type='file' new='x'/>", "<devices/disk new='x'>"),
        ("<disk type='network'/>", "<devices/disk type='network'>"),
        (
            "<disk type='file'><source file='/i/a'><ssh/></source></disk>",
            "<devices/disk/source/ssh>",
        ),
        ("<tpm><backend type='passthrough'/></tpm>", "<devices/tpm/backend type='passthrough'>"),
        ("<interface type='vhostuser'/>", "<devices/interface type='vhostuser'>"),
    ],
)
def test_what_is_new_or_reaches_out_is_named(inside: str, told: str) -> None:
    (reason,) = harmless_elements.unknown(devices(inside), but=NOTHING)

    assert reason.startswith(told)


def test_a_guest_of_another_kind_is_not_known() -> None:
    assert list(harmless_elements.unknown(domain("", kind="xen"), but=NOTHING)) != []


def test_what_the_host_has_already_is_no_news_however_it_is_laid_out() -> None:
    here = ET.fromstring("<teleport a='1' b='2'> <to/> </teleport>")
    same = devices("<teleport b='2' a='1'><to/></teleport>")
    known = frozenset({harmless_elements.written(here)})

    assert list(harmless_elements.unknown(same, but=known)) == []
    assert list(harmless_elements.unknown(devices("<teleport a='2'/>"), but=known)) != []


def test_paths_are_found_wherever_they_stand_but_for_what_every_host_has() -> None:
    inside = (
        "<disk type='file'><source file='/i/a'/><serial>/etc/shadow</serial></disk>"
        "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>"
        "<rng model='virtio'><backend model='random'>/dev/sda</backend></rng>"
        "<interface type='user'><rom file='/usr/share/ipxe/x.rom'/></interface>"
        "<interface type='user'><rom file='/usr/share/../../etc/shadow'/></interface>"
    )
    found = list(harmless_elements.paths(devices(inside)))

    assert found == [
        ("devices/disk/source", "/i/a"),
        ("devices/rng/backend", "/dev/sda"),
        ("devices/interface/rom", "/usr/share/../../etc/shadow"),
    ]
