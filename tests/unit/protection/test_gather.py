"""Where a standby's new images go, and the space that they need there."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.support.builders import GUEST
from tests.support.protection_facts import DISK
from vmckpt.model.disk import Room
from vmckpt.model.host import Host
from vmckpt.policy.model import Protection
from vmckpt.protection import gather, start
from vmckpt.protection.request import Move, ProtectRequest
from vmckpt.units import Bytes

BETA = Host(name="beta", uri="qemu+tcp://beta/system", agent_state="/state")
REQUEST = ProtectRequest(guest="web1", to="beta", terms=Protection())
GIB = 1 << 30
LOOKED: dict[str, Any] = {
    "disks": [
        DISK,
        {**DISK, "name": "vdb", "source": "/data/web1.raw", "format": "raw"},
        {**DISK, "name": "sda", "source": "/iso/boot.iso", "read_only": True},
    ]
}


@pytest.mark.parametrize(
    ("backup", "asked", "folders"),
    [
        (BETA, REQUEST, {"vda": "/srv", "vdb": "/data"}),
        (replace(BETA, storage=("/a", "/b")), REQUEST, {"vda": "/b", "vdb": "/b"}),
        (replace(BETA, storage=("/a",)), replace(REQUEST, storage="/c"),
         {"vda": "/c", "vdb": "/c"}),
    ],
    ids=["beside the source's path", "the inventory's directory", "the operator's directory"],
)  # fmt: skip
def test_space_is_checked_where_the_images_are_created(
    backup: Host, asked: ProtectRequest, folders: Mapping[str, str]
) -> None:
    disks = gather.replicated(LOOKED)
    images = start._images(disks, backup, asked, "web1", "5e55")
    assert {name: str(PurePosixPath(path).parent) for name, path in images.items()} == folders
    needed = gather._needed(LOOKED, (), backup, asked)
    assert set(needed) == set(folders.values())
    assert sum(needed.values()) == 2 * GIB


def test_only_new_images_need_space() -> None:
    assert gather._needed(LOOKED, {"vda": "/x"}, BETA, REQUEST) == {"/data": GIB}
    assert gather._needed(LOOKED, {"vda": "/x", "vdb": "/y"}, BETA, REQUEST) == {"/state": 0}
    move = replace(REQUEST, move=Move(images={"vdb": "/pool/web1.raw"}, bandwidth=None))
    assert gather._needed(LOOKED, (), BETA, move) == {"/pool": GIB}


def test_images_on_one_file_system_share_its_space() -> None:
    needed = {"/srv": Bytes(4), "/data": Bytes(3), "/srv/more": Bytes(2)}
    answers = [{"images_device": device, "images": 9} for device in ("1", "2", "1")]
    one, other = gather._rooms(needed, answers)
    assert (one.device, one.free, one.needed) == ("1", 9, 6)
    assert other == Room(device="2", folder="/data", free=Bytes(9), needed=Bytes(3), grown=Bytes(3))


def test_an_overlay_gets_a_complete_image_and_that_is_said() -> None:
    (vda,) = GUEST.disks
    above = replace(vda, below=("/srv/debian.qcow2", "/srv/root.raw"))
    guest = replace(GUEST, disks=(above, replace(vda, target="vdb")))
    (found,) = gather.overlays(guest, LOOKED, (), "beta")
    assert found.text.startswith("disk vda is an overlay of /srv/debian.qcow2; the standby's image")
    assert gather.overlays(guest, LOOKED, {"vda"}, "beta") == []
