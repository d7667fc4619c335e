"""What a definition from another host may reach on this one."""

import pytest

from vmckpt.snapshot.restore.xml_safety import Here, unsafe_references
from vmckpt.store.format.metadata import DiskMake

QEMU = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"
PLAIN = """<os><nvram>/var/lib/libvirt/qemu/nvram/web1_VARS.fd</nvram></os>
<seclabel type='dynamic' model='dac'><label>+64055:+108</label></seclabel>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
<disk type='file'><source file='/srv/images/web1.qcow2'/><target dev='vda'/></disk>
<disk type='file' device='cdrom'><source file='/srv/images/x.iso'/><readonly/></disk>
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
    return "; ".join(unsafe_references(xml, images, disks, side))


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
        ("<devices><emulator>/tmp/x</emulator></devices>", "the emulator is '/tmp/x'"),
        ("<qemu:commandline><qemu:arg value='-x'/></qemu:commandline>", "QEMU-specific"),
        ("<qemu:override/>", "QEMU-specific"),
        ("<seclabel type='static' model='dac'><label>root</label></seclabel>", "security label"),
        ("<seclabel type='none'/>", "security label"),
        ("<devices><interface type='ethernet'><script path='/x'/></interface></devices>", "runs"),
        ("<devices><hostdev type='pci'><source><a/></source></hostdev></devices>", "pci device"),
        ("<devices><serial type='file'><source path='/etc/x'/></serial></devices>", "a serial"),
        ("<devices><serial type='pty'><log file='/etc/x'/></serial></devices>", "a log"),
        ("<devices><channel type='unix'><source path='/etc/x'/></channel></devices>", "a channel"),
        ("<devices><filesystem><source dir='/etc'/></filesystem></devices>", "a shared directory"),
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
    assert "QEMU-specific" in told(domain(arg.format("-x")), here=domain(arg.format("-y")))
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


DISK = "<devices><disk type='file'><source file='/srv/images/a.raw'>{}</source></disk></devices>"


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        (
            "<devices><filesystem type='mount'><binary path='/srv/images/tool'/></filesystem>"
            "</devices>",
            "<devices/filesystem/binary>",
        ),
        (
            "<devices><disk type='volume'><source pool='other' volume='x.img'/></disk></devices>",
            "<devices/disk type='volume'>",
        ),
        (
            "<devices><disk type='file'><source pool='other' volume='x.img'/></disk></devices>",
            "<devices/disk/source pool='other'>",
        ),
        ("<devices><disk type='nvme'/></devices>", "<devices/disk type='nvme'>"),
        ("<devices><disk type='network'/></devices>", "<devices/disk type='network'>"),
        ("<devices><interface type='hostdev'/></devices>", "<devices/interface type='hostdev'>"),
        (
            "<devices><interface type='user'><backend type='passt' logFile='/etc/cron.d/x'/>"
            "</interface></devices>",
            "<devices/interface/backend logFile='/etc/cron.d/x'>",
        ),
        (
            DISK.format("<dataStore type='file'><source file='/etc/shadow'/></dataStore>"),
            "<devices/disk/source/dataStore>",
        ),
        (
            "<devices><tpm><backend type='emulator'><source type='dir' path='/etc/cron.d'/>"
            "</backend></tpm></devices>",
            "<devices/tpm/backend/source> would be read at '/etc/cron.d'",
        ),
        (
            "<devices><disk type='file'><source file='/etc/shadow'/><readonly/></disk></devices>",
            "<devices/disk/source> would be read at '/etc/shadow'",
        ),
        ("<os><kernel>/etc/shadow</kernel></os>", "<os/kernel> would be read at '/etc/shadow'"),
        ("<os><loader>/usr/share/../../etc/shadow</loader></os>", "<os/loader> would be read"),
        (
            "<sysinfo type='fwcfg'><entry name='opt/x' file='/etc/shadow'/></sysinfo>",
            "<sysinfo type='fwcfg'>",
        ),
        ("<devices><input type='evdev'/></devices>", "<devices/input type='evdev'>"),
        ("<devices><shmem name='other'/></devices>", "<devices/shmem>"),
        ("<devices><lease/></devices>", "<devices/lease>"),
        ("<devices><invented/></devices>", "<devices/invented>"),
        ("<devices><disk type='file' invented='x'/></devices>", "<devices/disk invented='x'>"),
        ("<invented/>", "<invented>"),
        (
            "<devices><rng model='virtio'><backend model='random'>/etc/shadow</backend></rng>"
            "</devices>",
            "<devices/rng/backend> would be read at '/etc/shadow'",
        ),
        (
            "<devices><graphics type='vnc'><listen type='socket' socket='/etc/x'/></graphics>"
            "</devices>",
            "<devices/graphics/listen> would be read at '/etc/x'",
        ),
        (
            "<devices><disk type='file'><backingStore type='file'><source file='/etc/shadow'/>"
            "<backingStore type='block'><source dev='/dev/sda'/></backingStore></backingStore>"
            "</disk></devices>",
            "'/dev/sda'",
        ),
    ],
)
def test_what_is_not_known_to_be_harmless_is_refused_by_name(inside: str, reason: str) -> None:
    assert reason in told(domain(inside))
    assert told(domain(inside), here=domain(inside)) == ""


USUAL = """<memory unit='KiB'>1048576</memory><vcpu placement='static'>2</vcpu>
<resource><partition>/machine</partition></resource>
<sysinfo type='smbios'><system><entry name='serial'>/1</entry></system></sysinfo>
<os firmware='efi'><type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
<loader readonly='yes' secure='no' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>
<nvram template='/usr/share/OVMF/OVMF_VARS_4M.fd'>/var/lib/libvirt/qemu/nvram/w_VARS.fd</nvram>
<boot dev='hd'/></os>
<features><acpi/><hyperv mode='custom'><relaxed state='on'/></hyperv></features>
<cpu mode='host-model' check='partial'/><clock offset='utc'><timer name='rtc'/></clock>
<on_poweroff>destroy</on_poweroff><pm><suspend-to-mem enabled='no'/></pm>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
<disk type='file' device='disk'><driver name='qemu' type='qcow2' discard='unmap'/>
<source file='/srv/images/web1.qcow2' index='2'/>
<backingStore type='file' index='3'><format type='qcow2'/><source file='/srv/images/b.qcow2'/>
<backingStore type='file'><format type='raw'/><source file='/srv/images/c.raw'/><backingStore/>
</backingStore></backingStore>
<target dev='vda' bus='virtio'/><alias name='d'/><address type='pci' bus='0x04'/></disk>
<controller type='usb' index='0' model='qemu-xhci' ports='15'><address type='pci'/></controller>
<interface type='network'><mac address='52:54:00:01:02:03'/><source network='default'
portid='x' bridge='virbr0'/><target dev='vnet1'/><model type='virtio'/><link state='up'/>
</interface>
<serial type='pty'><source path='/dev/pts/3'/><target type='isa-serial' port='0'>
<model name='isa-serial'/></target></serial>
<channel type='unix'><source mode='bind' path='/run/libvirt/qemu/channel/1-w/org.qemu.0'/>
<target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel>
<channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>
<input type='tablet' bus='usb'/><tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>
<graphics type='spice' port='5900' autoport='yes'><listen type='address' address='127.0.0.1'/>
<image compression='off'/></graphics><sound model='ich9'/><audio id='1' type='spice'/>
<video><model type='virtio' heads='1' primary='yes'/></video>
<redirdev bus='usb' type='spicevmc'/><watchdog model='itco' action='reset'/>
<memballoon model='virtio'/><rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
</devices>"""


def test_a_guest_as_virt_install_makes_it_is_welcome() -> None:
    assert told(domain(USUAL)) == ""
