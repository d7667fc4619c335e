"""What a definition from another host may reach on this one."""

import pytest

from vmckpt.snapshot.sane import Here, against
from vmckpt.store.facts import DiskMake

QEMU = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"
PLAIN = """<os><nvram>/var/lib/libvirt/qemu/nvram/web1_VARS.fd</nvram></os>
<seclabel type='dynamic' model='dac'><label>+64055:+108</label></seclabel>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
<disk type='file'><source file='/srv/images/web1.qcow2'/><target dev='vda'/></disk>
<disk type='file' device='cdrom'><source file='/iso/x.iso'/><target dev='sda'/><readonly/></disk>
<serial type='file'><source path='/var/log/libvirt/web1.console'/></serial>
<console type='pty'><source path='/dev/pts/3'/></console>
<channel type='unix'><source path='/var/lib/libvirt/qemu/channel/target/web1/a.0'/></channel>
</devices>"""


def domain(inside: str = PLAIN) -> str:
    return f"<domain {QEMU}><name>web1</name>{inside}</domain>"


def disk(target: str = "vda", format_: str = "qcow2") -> DiskMake:
    return DiskMake(target=target, format=format_, size=1, options="")


def told(
    xml: str, *, here: str | None = None, images: dict[str, str] | None = None,
    disks: tuple[DiskMake, ...] = (disk(),), storage: tuple[str, ...] = ("/srv/images/",),
) -> str:  # fmt: skip
    images = {"vda": "/srv/images/web1.qcow2"} if images is None else images
    side = Here(host="beta", definition=here, storage=storage)
    return "; ".join(against(xml, images, disks, side))


def test_an_ordinary_guest_is_welcome() -> None:
    assert told(domain()) == ""


@pytest.mark.parametrize(
    ("path", "good"),
    [
        ("/srv/images/deep/er/a.raw", True),
        ("/var/lib/libvirt/images/a.raw", True),
        ("/etc/cron.d/x", False),
        ("/srv/images", False),
        ("/srv/images/../../etc/cron.d/x", False),
        ("/srv/imagesx/a.raw", False),
        ("srv/images/a.raw", False),
        ("/var/lib/libvirt/dnsmasq/default.conf", False),
    ],
)
def test_images_go_into_storage_alone(path: str, good: bool) -> None:
    assert bool(told(domain(), images={"vda": path})) is not good


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("<devices><emulator>/tmp/x</emulator></devices>", "its emulator is '/tmp/x'"),
        ("<qemu:commandline><qemu:arg value='-x'/></qemu:commandline>", "words of its own"),
        ("<qemu:override/>", "words of its own"),
        ("<seclabel type='static' model='dac'><label>root</label></seclabel>", "security label"),
        ("<seclabel type='none'/>", "security label"),
        ("<devices><interface type='ethernet'><script path='/x'/></interface></devices>", "runs"),
        ("<devices><hostdev type='pci'><source><a/></source></hostdev></devices>", "pci device"),
        ("<devices><serial type='file'><source path='/etc/x'/></serial></devices>", "a serial"),
        ("<devices><serial type='pty'><log file='/etc/x'/></serial></devices>", "a log"),
        ("<devices><channel type='unix'><source path='/etc/x'/></channel></devices>", "a channel"),
        ("<devices><filesystem><source dir='/etc'/></filesystem></devices>", "a shared folder"),
        ("<devices><disk><source dev='/dev/sda'/></disk></devices>", "disk ?"),
        ("<os><nvram><source file='/etc/x'/></nvram></os>", "NVRAM"),
        ("<devices><memory><source><path>/etc/x</path></source></memory></devices>", "memory"),
    ],
)
def test_what_reaches_into_the_host_needs_the_guest_to_have_it_there(
    inside: str, reason: str
) -> None:
    assert reason in told(domain(inside))
    assert told(domain(inside), here=domain(inside)) == ""


def test_what_the_guest_has_there_is_compared_whole() -> None:
    arg = "<qemu:commandline><qemu:arg value='{}'/></qemu:commandline>"
    assert "for QEMU" in told(domain(arg.format("-x")), here=domain(arg.format("-y")))
    device = "<devices><disk><source dev='/dev/{}'/></disk></devices>"
    assert "/dev/sdb" in told(domain(device.format("sdb")), here=domain(device.format("sda")))


def test_a_fork_may_be_beside_what_the_guest_has_there() -> None:
    here = domain("<devices><disk><source file='/data/web1.raw'/></disk></devices>")
    assert told(domain(""), here=here, images={"vda": "/data/test-vda.raw"}) == ""
    assert "vda would be written at '/data/test-vda.raw'" in told(
        domain(""), images={"vda": "/data/test-vda.raw"}
    )


@pytest.mark.parametrize("made", [disk("../x"), disk("a/b"), disk(""), disk(format_="luks")])
def test_disks_have_plain_names_and_formats_that_are_known(made: DiskMake) -> None:
    assert told(domain(), disks=(made,))
