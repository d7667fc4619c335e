"""How each disk is read: the table, and what is told of it."""

from dataclasses import replace
from typing import Any

import pytest

from vmckpt.capture.disks.plan import How, Parent, plan
from vmckpt.model.disk import Bitmap, Checkpoint, DiskFacts, DiskOrder
from vmckpt.model.finding import Severity
from vmckpt.units import MIB, Bytes

PARENT = Parent(id="s-1", made_at=1700000000, sizes={"vda": Bytes(64 * MIB)})
GOOD = Bitmap(name="vmckpt-s-1")
DISK = DiskFacts(
    name="vda", kind="file", device="disk", format="qcow2", source="/images/a.qcow2",
    size=Bytes(64 * MIB), version=3, node="libvirt-1-format", bitmaps=(GOOD,),
)  # fmt: skip
KNOWN = Checkpoint(name="vmckpt-s-1", parent=None, made_at=1700000000, disks={"vda": "vmckpt-s-1"})


@pytest.mark.parametrize(
    ("change", "how", "mark", "told", "reason"),
    [
        pytest.param({}, How.INCREMENTAL, True, False, "changes since s-1", id="good"),
        pytest.param({"bitmaps": ()}, How.FULL, True, True, "is missing", id="bitmap-lost"),
        pytest.param(
            {"bitmaps": (replace(GOOD, name="vmckpt-s-0"),)}, How.FULL, True, True, "is missing",
            id="other-bitmap",
        ),
        pytest.param(
            {"bitmaps": (replace(GOOD, inconsistent=True, recording=False),)},
            How.FULL, True, True, "without saving", id="inconsistent",
        ),
        pytest.param(
            {"bitmaps": (replace(GOOD, recording=False),)}, How.FULL, True, True, "or disabled",
            id="not-recording",
        ),
        pytest.param(
            {"bitmaps": (replace(GOOD, busy=True),)}, How.FULL, True, True, "in use", id="busy"
        ),
        pytest.param({"size": Bytes(65 * MIB)}, How.FULL, True, True, "bytes in", id="resized"),
        pytest.param({"size": None}, How.INCREMENTAL, True, False, "since", id="size-not-told"),
        pytest.param({"name": "vdb"}, How.FULL, True, False, "was not in", id="new-disk"),
        pytest.param(
            {"format": "raw", "version": None, "bitmaps": ()}, How.FULL, False, False,
            "raw images cannot", id="raw",
        ),
        pytest.param(
            {"version": 2, "bitmaps": ()}, How.FULL, False, True, "has version 2", id="qcow2-v2"
        ),
        pytest.param({"source": None}, How.LEFT_OUT, False, False, "is empty", id="empty"),
        pytest.param({"device": "cdrom"}, How.LEFT_OUT, False, False, "a cdrom", id="cdrom"),
        pytest.param({"device": "floppy"}, How.LEFT_OUT, False, False, "a floppy", id="floppy"),
        pytest.param({"read_only": True}, How.LEFT_OUT, False, False, "cannot write", id="ro"),
        pytest.param({"shareable": True}, How.LEFT_OUT, False, True, "other guests", id="shared"),
        pytest.param({"device": "lun"}, How.LEFT_OUT, False, True, "SCSI", id="lun"),
        pytest.param(
            {"kind": "vhostuser"}, How.LEFT_OUT, False, True, "does not pass through QEMU",
            id="vhostuser",
        ),
        pytest.param(
            {"kind": "network", "format": "raw"}, How.FULL, False, True,
            "raw images cannot hold a bitmap; a disk of type network cannot be", id="network",
        ),
        pytest.param(
            {"kind": "block", "format": "raw"}, How.FULL, False, True,
            "a disk of type block cannot be restored", id="block",
        ),
        pytest.param(
            {"format": "luks"}, How.FULL, False, True, "an encrypted disk cannot be", id="luks"
        ),
    ],
)  # fmt: skip
def test_a_disk_is_read_as_it_can_be(
    change: dict[str, Any], how: How, mark: bool, told: bool, reason: str
) -> None:
    found = plan([replace(DISK, **change)], PARENT, [KNOWN])
    choice, finding = found.choices[0], found.findings("web1")[0]

    assert (choice.how, choice.mark, not choice.expected) == (how, mark, told)
    assert reason in choice.reason
    assert (finding.severity is Severity.WARNING) == told
    assert finding.text.startswith(f"disk {choice.name}: ")


def test_the_first_snapshot_of_a_line_is_whole() -> None:
    found = plan([DISK], None, [KNOWN])

    assert (found.since, found.redefine) == (None, ())
    assert [(c.how, c.mark, c.expected) for c in found.choices] == [(How.FULL, True, True)]


def test_bitmaps_without_libvirts_notes_are_defined_anew() -> None:
    raw = replace(DISK, name="vdb", format="raw", version=None, bitmaps=())
    other = Checkpoint(name="theirs", parent=None, made_at=5)

    assert plan([DISK, raw], PARENT, [KNOWN, other]).redefine == ()
    assert plan([replace(DISK, bitmaps=())], PARENT, []).redefine == ()
    assert plan([DISK, raw], PARENT, []).redefine == (KNOWN,)
    assert plan([DISK], PARENT, [other]).redefine == (replace(KNOWN, parent="theirs"),)


def test_the_order_names_every_disk() -> None:
    raw = replace(DISK, name="vdb", format="raw", version=None, bitmaps=())
    cdrom = replace(DISK, name="sda", device="cdrom")
    found = plan([DISK, raw, cdrom], PARENT, [KNOWN])
    order = found.order("s-2", "/run/x")

    assert found.captured
    assert not plan([cdrom], PARENT, []).captured
    assert order.disks == (
        DiskOrder(name="vda", since="vmckpt-s-1", mark=True), DiskOrder(name="vdb"),
    )  # fmt: skip
    assert order.left_out == ("sda",)
    assert (order.socket, order.scratch("vda")) == (
        "/run/x/vmckpt-s-2.nbd", "/run/x/vmckpt-s-2.vda.scratch",
    )  # fmt: skip


@pytest.mark.parametrize("disk", ["vda", None])
def test_a_refused_bitmap_makes_that_disk_whole(disk: str | None) -> None:
    raw = replace(DISK, name="vdb", format="raw", version=None, bitmaps=())
    found = plan([DISK, raw], PARENT, [KNOWN]).whole(disk, "libvirt says so")

    assert found.order("s-2", "/run/x").disks == (
        DiskOrder(name="vda", mark=True), DiskOrder(name="vdb"),
    )  # fmt: skip
    assert [f.severity for f in found.findings("web1")] == [Severity.WARNING, Severity.INFO]
    assert found.choices[0].reason == "libvirt says so"


def test_another_disks_refusal_changes_nothing() -> None:
    found = plan([DISK], PARENT, [KNOWN])

    assert found.whole("vdb", "no") == found
