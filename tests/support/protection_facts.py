"""A guest that can be protected, as preflight sees it, to be changed by `dataclasses.replace`."""

from tests.support.builders import host_facts
from vmckpt.model.disk import Room
from vmckpt.model.epoch_cost import EpochCost, Finder
from vmckpt.protection.preflight import ProtectionFacts
from vmckpt.units import MIB, Bytes, Seconds

DISK = {
    "name": "vda", "device": "disk", "source": "/srv/web1.qcow2", "read_only": False,
    "shareable": False,
    "node": "node0", "size": 1 << 30, "format": "qcow2", "kind": "file",
}  # fmt: skip


def room(free: int) -> Room:
    return Room(
        device="1", folder="/srv", free=Bytes(free), needed=Bytes(1 << 30), grown=Bytes(1 << 30)
    )


FINE = ProtectionFacts(
    guest="web1", primary="alpha", backup="beta", qemu="7.2.22", memory=[256 * MIB], disks=[DISK],
    devices=["disk", "interface"], primary_facts=host_facts("a"), backup_facts=host_facts("b"),
    name_taken=False, rooms=(room(1 << 30),), shared_room=(Bytes(8 << 30), Bytes(8 << 30)),
    has_lease=True, fence=None, automatic=True, max_pause=Seconds(0.5),
    epoch_cost=EpochCost(
        finder=Finder.WRITE_TRACKING, scan=Seconds(0.001), written=Bytes(2 * MIB)
    ),
)  # fmt: skip
