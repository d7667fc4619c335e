"""Count the kinds of guests that libvirt or QEMU refuses to move, and what preflight says of them.

    apt-get source libvirt
    python -m bench.foreign_definitions libvirt-9.0.0/tests/qemuxml2argvdata

Each definition is checked as that of a running guest, with two hosts that are otherwise fine and
have nothing that the definition names. The expectations below are independent of the product's
own tables: they were read from libvirt's sources (qemuMigrationSrcIsAllowed) and QEMU's blockers.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree as ET

from vmckpt.definition.needs import Answer, needs
from vmckpt.hypervisor import domain_xml
from vmckpt.migration.plan import preflight
from vmckpt.migration.plan.facts import Facts
from vmckpt.model.guest import Guest
from vmckpt.model.host import HostFacts
from vmckpt.units import Bytes


@dataclass(frozen=True)
class Refused:
    """A kind of guest that cannot move, and the codes of findings that say so."""

    kind: str
    path: str
    codes: frozenset[str]


def _refused(kind: str, path: str, *codes: str) -> Refused:
    return Refused(kind, path, frozenset(codes))


REFUSED = (
    _refused("transient disk", "devices/disk/transient", "disk-transient"),
    _refused("shared memory, not master", "devices/shmem[@role!='master']", "shmem"),
    _refused("shared memory, legacy", "devices/shmem/model[@type='ivshmem']", "shmem"),
    _refused("encrypted memory", "launchSecurity[@type='sev']", "launch-security"),
    _refused("vDPA card", "devices/interface[@type='vdpa']", "nic-vdpa"),
    _refused("3D graphics", "devices/video/model/acceleration[@accel3d='yes']", "video-3d"),
    _refused("host's input device", "devices/input[@type='passthrough']", "input-passthrough"),
    _refused("host's TPM", "devices/tpm/backend[@type='passthrough']", "tpm-passthrough"),
    _refused("virtiofs", "devices/filesystem/driver[@type='virtiofs']", "host-device"),
    _refused("PCI device", "devices/hostdev[@type='pci']", "host-device", "host-device-missing"),
    _refused("mediated device", "devices/hostdev[@type='mdev']", "host-device"),
    _refused("SCSI device", "devices/hostdev[@type='scsi']", "host-device"),
    _refused("NVMe disk", "devices/disk[@type='nvme']", "storage-not-visible"),
    _refused("secret missing", ".//secret[@uuid]", "secret-missing"),
    _refused("secret by usage missing", ".//auth/secret[@usage]", "secret-missing"),
    _refused("network filter missing", "devices/interface/filterref", "nwfilter-missing"),
    _refused("network missing", "devices/interface[@type='network']", "network-missing"),
    _refused("bridge missing", "devices/interface[@type='bridge']", "network-missing"),
    _refused("storage pool missing", "devices/disk[@type='volume']", "pool-missing"),
    _refused("kernel missing", "os/kernel", "file-missing"),
    _refused("huge pages missing", "memoryBacking/hugepages", "huge-pages-short", "huge-pages"),
    _refused("NUMA node missing", "numatune/memory[@nodeset]", "numa-node-missing"),
    _refused("pinned to a missing CPU", "cputune/vcpupin", "cpu-missing"),
)
ALLOWED = {
    "USB device of the host": "devices/hostdev[@type='usb']",
    "optional CD": "devices/disk/source[@startupPolicy='optional']",
    "PCI card with teaming": "devices/interface/teaming[@type='transient']",
}
"""Kinds that libvirt migrates, if the target has what they need."""


def definitions(folders: list[Path]) -> Iterator[tuple[str, ET.Element, Guest]]:
    """Yield the definitions of QEMU's guests that can be read.

    Those that libvirt's tests call invalid cannot be defined, and are left out.
    """
    files = sorted(one for folder in folders for one in folder.glob("*.xml"))
    for path in [one for one in files if "invalid" not in one.name]:
        try:
            text = path.read_text()
            root = domain_xml.tree(text, "domain")
            guest = domain_xml.guest(
                text, state=1, persistent=True, autostart=False, snapshots=0, job=None
            )
        except (ValueError, SyntaxError):
            continue
        if root.get("type") in ("kvm", "qemu"):
            yield path.name, root, guest


def codes(root: ET.Element, guest: Guest, *, has_all: bool) -> set[str]:
    """Return the codes of all blockers, and of warnings about huge pages."""
    host = HostFacts(
        hostname="h", uuid="", libvirt_version="9.0.0", qemu_version="7.2.22", cpus=8,
        memory=Bytes(1 << 50), memory_free=Bytes(1 << 50), machines=frozenset({guest.machine}),
        accelerators=frozenset({"kvm", "qemu"}),
        networks=frozenset(nic.source or "" for nic in guest.nics) if has_all else frozenset(),
        guests=(),
    )  # fmt: skip
    wanted = needs(root)
    answer = Answer.PRESENT if has_all else Answer.ABSENT
    files = {disk.source or "" for disk in guest.disks} | {
        path for disk in guest.disks for path in disk.below
    }
    facts = Facts(
        name=guest.name, source="a", target="b", guest=guest,
        source_facts=replace(host, uuid="a"), target_facts=replace(host, uuid="b"),
        target_links=frozenset(nic.source or "" for nic in guest.nics) if has_all else frozenset(),
        same_file=dict.fromkeys(files, True), on_target=dict.fromkeys(files, True),
        needs=wanted, answers=dict.fromkeys(wanted, answer), cpu_fits=True,
    )  # fmt: skip
    found = preflight.check_move(facts)
    return {one.code for one in preflight.blockers(found)} | (
        {one.code for one in found} & {"huge-pages"}
    )


def main() -> int:
    """Print the table. Returns 1 if a definition of a refused kind is not reported."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", nargs="+", type=Path, help="directories with domain XMLs")
    parser.add_argument("--json", type=Path, help="file for the counts")
    given = parser.parse_args()
    known = list(definitions(given.folders))
    rows: list[tuple[str, int, list[str]]] = []
    silent = 0
    for kind in REFUSED:
        having = [one for one in known if one[1].find(kind.path) is not None]
        named = [one for one in having if codes(one[1], one[2], has_all=False) & kind.codes]
        left = [name for name, *_ in having if name not in {one[0] for one in named}]
        silent += len(left)
        rows.append((kind.kind, len(having), left))
    for kind_name, path in ALLOWED.items():
        having = [one for one in known if one[1].find(path) is not None]
        others = {code for kind in REFUSED for code in kind.codes} - {"host-device"}
        wrong = [
            name for name, root, guest in having
            if codes(root, guest, has_all=True) and not codes(root, guest, has_all=True) & others
        ]  # fmt: skip
        rows.append((f"{kind_name} (allowed)", len(having), wrong))
    print(f"{len(known)} definitions")
    for name, count, left in rows:
        print(f"{name:34}{count:6}  wrong: {len(left)} {' '.join(left[:4])}".rstrip())
    if given.json is not None:
        counts = [{"kind": name, "definitions": count, "wrong": left} for name, count, left in rows]
        given.json.write_text(json.dumps({"definitions": len(known), "rows": counts}, indent=1))
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
