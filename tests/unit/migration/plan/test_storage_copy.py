"""Which disks are copied, to where, and what is against it."""

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.following import words
from tests.support.shell import Shell
from vmckpt.migration.plan import storage_copy
from vmckpt.model.disk import CopyOptions, CopyPlan, Drive, Image, Place
from vmckpt.model.finding import Severity
from vmckpt.remote import images
from vmckpt.units import MIB, Bytes

VDA = Drive(
    name="vda", kind="file", device="disk", path="/images/web.raw", format="raw",
    read_only=False, encrypted=False,
)  # fmt: skip
VDB = replace(VDA, name="vdb", path="/data/big.qcow2", format="qcow2")
CD = replace(VDA, name="sda", device="cdrom", path="/iso/debian.iso", read_only=True)
EMPTY = replace(CD, name="sdb", path=None)
NETWORK = replace(VDA, name="vdc", kind="network", path=None)
IMAGE = Image(size=Bytes(512 * MIB), allocated=Bytes(20 * MIB), options="", mode="600")
PLACE = Place(exists=False, writable=True, device="1", free=Bytes(1024 * MIB))


def planned(
    *drives: Drive,
    wish: CopyOptions | None = None,
    same: dict[str, bool] | None = None,
    image: Image | str = IMAGE,
    place: Place | None = PLACE,
    chains: Mapping[str, Sequence[str]] | None = None,
) -> CopyPlan:
    wish = wish or CopyOptions()
    known = {drive.path: False for drive in drives if drive.path} if same is None else same
    paths = [storage_copy.path_on_target(drive, wish) for drive in drives if drive.path]
    return storage_copy.plan(
        source="alpha", target="beta", drives=drives, same_file=known, wish=wish,
        images={drive.path: image for drive in drives if drive.path},
        places={} if place is None else dict.fromkeys(paths, place),
        chains=chains or {},
    )  # fmt: skip


def codes(plan: CopyPlan) -> list[str]:
    return [finding.code for finding in plan.findings]


def test_what_is_not_shared_and_written_to_is_copied() -> None:
    plan = planned(VDA, VDB, CD, EMPTY, NETWORK)

    assert plan.disks == ("vda", "vdb")
    assert plan.rest_shared
    assert plan.placed == {"vda": "/images/web.raw", "vdb": "/data/big.qcow2"}
    assert plan.left_behind == ("/images/web.raw", "/data/big.qcow2")
    assert codes(plan) == ["disk-copied", "disk-copied"]


@pytest.mark.parametrize(
    ("same", "wish", "copied", "rest_shared"),
    [
        ({"/images/web.raw": True, "/data/big.qcow2": True}, CopyOptions(), (), True),
        ({"/images/web.raw": True, "/data/big.qcow2": False}, CopyOptions(), ("vdb",), True),
        ({"/data/big.qcow2": False}, CopyOptions(), ("vdb",), False),
        ({}, CopyOptions(), (), False),
        ({}, CopyOptions(disks=("vda",)), ("vda",), False),
        ({"/data/big.qcow2": True}, CopyOptions(disks=("vda",)), ("vda",), True),
        (
            {"/images/web.raw": False, "/data/big.qcow2": False},
            CopyOptions(disks=("vda",)), ("vda",), False,
        ),
    ],
)  # fmt: skip
def test_who_is_chosen_and_what_is_proven_of_the_rest(
    same: dict[str, bool], wish: CopyOptions, copied: tuple[str, ...], rest_shared: bool
) -> None:
    plan = planned(VDA, VDB, CD, same=same, wish=wish)

    assert (plan.disks, plan.rest_shared) == (copied, rest_shared)


@pytest.mark.parametrize(
    ("drive", "shared"), [(NETWORK, True), (replace(NETWORK, kind="volume"), False)]
)
def test_a_drive_without_a_path_is_proven_only_on_the_network(drive: Drive, shared: bool) -> None:
    assert planned(VDA, drive).rest_shared is shared


@pytest.mark.parametrize(
    ("drive", "image", "code"),
    [
        (replace(VDA, kind="block"), IMAGE, "disk-not-copied"),
        (replace(VDA, format="vmdk"), IMAGE, "disk-not-copied"),
        (replace(VDA, shareable=True), IMAGE, "disk-shared"),
        (replace(VDA, encrypted=True), IMAGE, "disk-encrypted"),
        (VDA, "alpha: /images/web.raw: Permission denied", "disk-unread"),
        (VDB, replace(IMAGE, backing="/images/base.qcow2"), "disk-backing"),
        (VDB, replace(IMAGE, data_file="/images/data"), "disk-data-file"),
        (VDB, replace(IMAGE, damaged=True), "disk-damaged"),
    ],
)
def test_what_cannot_be_copied_is_named(drive: Drive, image: Image | str, code: str) -> None:
    plan = planned(drive, image=image)

    assert codes(plan) == [code]
    assert plan.copies == ()
    assert (drive.path or "") in plan.findings[0].text


def test_a_corrupt_image_is_copied_after_the_repair_that_the_hint_names(
    tmp_path: Path,
) -> None:
    path = tmp_path / "of web.qcow2"
    subprocess.run(("qemu-img", "create", "-q", "-f", "qcow2", path, "1M"), check=True)
    with path.open("r+b") as image:
        image.seek(79)
        image.write(b"\2")  # the corrupt bit, among the features that a reader must know
    disk = replace(VDB, path=str(path))

    def plan() -> CopyPlan:
        found = asyncio.run(images.describe(Shell(tmp_path), str(path), "qcow2"))
        return planned(disk, image=found)

    before = plan()
    assert codes(before) == ["disk-damaged"]
    subprocess.run(words(before.findings[0].hint or ""), check=True, stdout=subprocess.DEVNULL)
    assert codes(plan()) == ["disk-copied"]


def test_a_directory_that_is_missing_on_the_target_is_made(tmp_path: Path) -> None:
    disk = replace(VDA, path=str(tmp_path / "new one" / "web.raw"))
    path = disk.path or ""

    def plan() -> CopyPlan:
        found = asyncio.run(images.places(Shell(tmp_path), [path]))
        return planned(disk, place=found[path])

    before = plan()
    assert codes(before) == ["disk-copied", "disk-no-folder"]
    subprocess.run(words(before.findings[1].hint or ""), check=True)
    assert codes(plan()) == ["disk-copied"]


@pytest.mark.parametrize(
    ("same", "format_", "wish", "kept"),
    [
        ({"/images/base.qcow2": True, "/images/root.raw": True}, "qcow2", CopyOptions(), True),
        ({"/images/base.qcow2": True}, "qcow2", CopyOptions(), False),
        ({"/images/base.qcow2": True, "/images/root.raw": False}, "qcow2", CopyOptions(), False),
        ({"/images/base.qcow2": True, "/images/root.raw": True}, None, CopyOptions(), False),
        ({"/images/base.qcow2": True, "/images/root.raw": True}, "qcow2", CopyOptions(full=True),
         False),
    ],
)  # fmt: skip
def test_an_overlay_is_copied_alone_if_both_hosts_have_all_that_is_below_it(
    same: dict[str, bool], format_: str | None, wish: CopyOptions, kept: bool
) -> None:
    above = replace(IMAGE, backing="base.qcow2", backing_format=format_)
    chains = {"vdb": ("/images/base.qcow2", "/images/root.raw")}
    plan = planned(
        VDB, image=above, wish=wish, same={"/data/big.qcow2": False, **same}, chains=chains
    )
    assert codes(plan) == ["disk-copied" if kept else "disk-backing"]
    assert plan.shallow == kept
    if kept:
        assert plan.copies[0].base == ("/images/base.qcow2", "qcow2")
        assert "without its backing file /images/base.qcow2" in plan.findings[0].text
    else:
        assert "virsh blockpull GUEST vdb --wait" in str(plan.findings[0].hint)
    unknown = planned(VDB, image=above, wish=wish, same={"/data/big.qcow2": False, **same})
    assert codes(unknown) == ["disk-backing"], "the chain of a guest that is off is not known"


@pytest.mark.parametrize(
    ("wish", "code", "words"),
    [
        (CopyOptions(disks=("vdx",)), "disk-unknown", "from the guest's disks: vda, sda, sdb"),
        (CopyOptions(disks=("sda",)), "disk-not-copied", "read-only"),
        (CopyOptions(disks=("sdb",)), "disk-not-copied", "read-only"),
        (CopyOptions(disks=("vda",)), "disk-shared", "onto itself"),
    ],
)
def test_wishes_that_make_no_sense(wish: CopyOptions, code: str, words: str) -> None:
    plan = planned(VDA, CD, EMPTY, wish=wish, same={"/images/web.raw": True})

    assert plan.findings[0].code == code
    assert words in f"{plan.findings[0].text}; {plan.findings[0].hint}"


@pytest.mark.parametrize(
    ("place", "code"),
    [
        (None, "disk-place-unknown"),
        (replace(PLACE, exists=True), "disk-in-the-way"),
        (replace(PLACE, writable=False), "disk-no-folder"),
    ],
)
def test_the_place_on_the_target(place: Place | None, code: str) -> None:
    assert codes(planned(VDA, place=place)) == ["disk-copied", code]


@pytest.mark.parametrize(
    ("full", "free", "code"),
    [
        (False, 600, None),
        (False, 100, "disk-overcommitted"),
        (False, 22, "disk-overcommitted"),
        (False, 21, "disk-room"),
        (True, 512, None),
        (True, 511, "disk-room"),
    ],
)
def test_room_for_one_disk(full: bool, free: int, code: str | None) -> None:
    place = replace(PLACE, free=Bytes(free * MIB))
    plan = planned(VDA, wish=CopyOptions(full=full), place=place)

    assert codes(plan) == ["disk-copied", *([code] if code else [])]


def test_disks_on_one_file_system_share_its_room() -> None:
    place = replace(PLACE, free=Bytes(700 * MIB))
    other = replace(VDA, name="vdd", path="/images/more.raw")

    assert "disk-room" in codes(planned(VDA, other, wish=CopyOptions(full=True), place=place))


def test_another_folder() -> None:
    plan = planned(VDA, wish=CopyOptions(folder="/srv/images"))

    assert plan.placed == {"vda": "/srv/images/web.raw"}
    assert plan.copies[0].source == "/images/web.raw"


def test_two_disks_of_one_name_do_not_go_into_one_folder() -> None:
    other = replace(VDA, name="vdd", path="/elsewhere/web.raw")
    plan = planned(VDA, other, wish=CopyOptions(folder="/srv"))

    assert [f.text for f in plan.findings if f.code == "disk-twins"] == [
        "disks vda and vdd would both be copied to /srv/web.raw"
    ]


def test_snapshots_inside_stay_behind() -> None:
    assert codes(planned(VDB, image=replace(IMAGE, snapshots=2))) == [
        "disk-copied", "disk-snapshots",
    ]  # fmt: skip


def test_an_image_with_snapshots_inside_is_not_removed() -> None:
    wish = CopyOptions(remove=True)
    plain, kept = (
        planned(VDA, wish=wish),
        planned(VDB, wish=wish, image=replace(IMAGE, snapshots=2)),
    )
    assert (plain.removes, codes(plain)) == (True, ["disk-copied"])
    assert "is removed after the guest has arrived" in plain.findings[0].text
    assert [one.code for one in kept.findings if one.severity is Severity.BLOCKER] == [
        "disk-snapshots"
    ]


def test_what_qemu_img_tells() -> None:
    told = """{"virtual-size": 536870912, "actual-size": 21250048, "format": "qcow2",
      "cluster-size": 131072, "backing-filename": "base.qcow2",
      "backing-filename-format": "raw", "snapshots": [{"id": "1"}],
      "format-specific": {"type": "qcow2", "data": {"compat": "1.1", "compression-type": "zlib",
      "lazy-refcounts": true, "refcount-bits": 16, "corrupt": false, "extended-l2": false}}}"""

    assert images.parse(told, "640", "qcow2") == Image(
        size=Bytes(536870912), allocated=Bytes(21250048), mode="640", backing="base.qcow2",
        backing_format="raw",
        snapshots=1, options="compat=1.1,cluster_size=131072,refcount_bits=16,lazy_refcounts=on,"
        "extended_l2=off,compression_type=zlib",
    )  # fmt: skip


def test_an_old_qcow2_is_copied_as_an_old_qcow2() -> None:
    told = """{"virtual-size": 1048576, "actual-size": 4096, "cluster-size": 65536,
      "format-specific": {"type": "qcow2", "data": {"compat": "0.10", "refcount-bits": 16,
      "compression-type": "zlib"}}}"""

    assert images.parse(told, "600", "qcow2").options == (
        "compat=0.10,cluster_size=65536,refcount_bits=16,compression_type=zlib"
    )


def test_a_raw_image_has_no_make() -> None:
    told = '{"virtual-size": 512, "actual-size": 0, "format": "raw"}'

    assert images.parse(told, "644", "raw").options == ""
