"""What is asked of libvirt for the disks of one snapshot, in which order, and after what."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from vmckpt.capture.disks import live
from vmckpt.capture.disks.live import DiskCapture, DiskUndo, put_back
from vmckpt.capture.disks.plan import How, Parent
from vmckpt.errors import CaptureFailed, HypervisorError, OutcomeUnknown, StoreError
from vmckpt.hypervisor.backup import Backups, BitmapLost
from vmckpt.model.disk import BackupOrder, Bitmap, Checkpoint, DiskFacts, OpenBackup, OpenDisk
from vmckpt.units import MIB, Bytes, Seconds

VDA = DiskFacts(
    name="vda", kind="file", device="disk", format="qcow2", source="/i/a", version=3,
    size=Bytes(MIB), node="n", bitmaps=(Bitmap(name="vmckpt-s-1"),),
)  # fmt: skip
RAW = DiskFacts(
    name="vdb", kind="file", device="disk", format="raw", source="/i/b", size=Bytes(MIB), node="m"
)
PARENT = Parent(id="s-1", made_at=5, sizes={"vda": Bytes(MIB)})


class Fake(Backups):
    """libvirt as far as it goes here."""

    def __init__(self, *disks: DiskFacts) -> None:
        self.disks = disks
        self.did: list[str] = []
        self.refusals: list[HypervisorError] = []
        self.known: tuple[Checkpoint, ...] = (
            Checkpoint(name="vmckpt-s-1", parent=None, made_at=5),
        )
        self.lost: tuple[str, ...] = ()
        self.orders: list[BackupOrder] = []
        self.open: OpenBackup | None = None

    def facts(self) -> tuple[DiskFacts, ...]:
        return self.disks

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return self.known

    def begin(self, order: BackupOrder) -> OpenBackup:
        self.did.append("begin")
        self.orders.append(order)
        if self.refusals:
            raise self.refusals.pop(0)
        names = [OpenDisk(name=disk.name, changed=disk.since) for disk in order.disks]
        return OpenBackup(socket=order.socket, disks=tuple(names))

    def opened(self) -> OpenBackup | None:
        return self.open

    def end(self, socket: str, *, limit: Seconds = Seconds(1.0)) -> bool:
        assert socket.endswith("/vmckpt-s-2.nbd")
        self.did.append("end")
        return True

    def forget(self, name: str) -> None:
        self.did.append(f"forget {name}")

    def sweep(self, keep: Collection[str]) -> tuple[str, ...]:
        self.did.append(f"sweep but {' '.join(sorted(keep))}")
        return ()

    def redefine(self, line: Sequence[Checkpoint], *, validate: bool = True) -> tuple[str, ...]:
        assert validate
        self.did.append(f"redefine {' '.join(one.name for one in line)}")
        return self.lost


def capture(fake: Fake, folder: Path) -> DiskCapture:
    return DiskCapture(fake, guest="u", host="alpha", snapshot="s-2", folder=folder)


def begun(disks: DiskCapture, parent: Parent | None) -> None:
    disks.prepare(parent)
    disks.freeze_point()


def lost(disk: str | None) -> BitmapLost:
    where = f" for disk '{disk}'" if disk else ""
    return BitmapLost(HypervisorError(f"missing or broken bitmap 'x'{where}", host="alpha"))


def test_a_kept_snapshot_leaves_its_checkpoint_and_those_of_other_lines(tmp_path: Path) -> None:
    fake = Fake(VDA, RAW)
    with capture(fake, tmp_path) as disks:
        undo = disks.prepare(PARENT, ["s-other"])
        disks.freeze_point()
        assert [(disk.name, disk.changed) for disk in disks.disks] == [
            ("vda", "vmckpt-s-1"), ("vdb", None),
        ]  # fmt: skip
        disks.end()
        assert disks.disks == ()
        disks.keep_bitmap(["s-other"])

    assert undo.files == tuple(
        f"{tmp_path}/vmckpt-s-2.{end}" for end in ("nbd", "vda.scratch", "vdb.scratch")
    )
    assert fake.did == [
        "sweep but vmckpt-s-1 vmckpt-s-other", "begin", "end", "end",
        "sweep but vmckpt-s-2 vmckpt-s-other",
    ]  # fmt: skip


def test_one_that_is_not_kept_leaves_nothing(tmp_path: Path) -> None:
    fake = Fake(VDA)
    left = tmp_path / "vmckpt-s-2.nbd"

    def fails() -> None:
        with capture(fake, tmp_path) as disks:
            begun(disks, None)
            left.touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert fake.did[1:] == ["begin", "end", "forget vmckpt-s-2"]
    assert not left.exists()


def test_before_the_instant_there_is_nothing_to_end(tmp_path: Path) -> None:
    fake = Fake(VDA)
    with capture(fake, tmp_path) as disks:
        disks.prepare(PARENT)

    assert fake.did == ["sweep but vmckpt-s-1"]


def test_what_may_have_begun_is_ended(tmp_path: Path) -> None:
    fake = Fake(VDA)
    fake.refusals = [OutcomeUnknown("alpha: no answer", host="alpha")]
    with pytest.raises(OutcomeUnknown), capture(fake, tmp_path) as disks:
        begun(disks, PARENT)

    assert fake.did[1:] == ["begin", "end", "forget vmckpt-s-2"]


@pytest.mark.parametrize("named", ["vda", None])
def test_a_refused_bitmap_is_a_second_call_for_the_whole_disk(
    tmp_path: Path, named: str | None
) -> None:
    fake = Fake(VDA, RAW)
    fake.refusals = [lost(named)]
    with capture(fake, tmp_path) as disks:
        disks.prepare(PARENT)
        disks.freeze_point()
        assert disks.plan is not None
        assert [choice.how for choice in disks.plan.choices] == [How.FULL, How.FULL]
        assert [finding.code for finding in disks.plan.findings("web1")] == [
            "disk-bitmap-lost", "disk-read",
        ]  # fmt: skip

    assert [[disk.since for disk in order.disks] for order in fake.orders] == [
        ["vmckpt-s-1", None], [None, None],
    ]  # fmt: skip


def test_the_same_refusal_again_is_the_end_of_it(tmp_path: Path) -> None:
    fake = Fake(VDA)
    fake.refusals = [lost("vda"), lost("vda")]
    with pytest.raises(BitmapLost), capture(fake, tmp_path) as disks:
        begun(disks, PARENT)


@pytest.mark.parametrize(("gone", "how"), [((), How.INCREMENTAL), (("vmckpt-s-1",), How.FULL)])
def test_after_a_migration_the_line_is_defined_anew(
    tmp_path: Path, gone: tuple[str, ...], how: How
) -> None:
    fake = Fake(VDA)
    fake.known, fake.lost = (), gone
    with capture(fake, tmp_path) as disks:
        disks.prepare(PARENT)
        assert fake.did[-1] == "redefine vmckpt-s-1"
        assert disks.plan is not None
        assert disks.plan.choices[0].how is how


def test_a_guest_without_disks_has_no_instant(tmp_path: Path) -> None:
    fake = Fake()
    with capture(fake, tmp_path) as disks:
        assert disks.prepare(None).files == (f"{tmp_path}/vmckpt-s-2.nbd",)
        disks.make_room()
        disks.freeze_point()
        assert disks.disks == ()
        disks.end()

    assert fake.did == ["sweep but "]


def test_room_that_cannot_be_made_is_left_to_libvirt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scratch(path: str, size: int) -> bool:
        assert size == MIB
        Path(path).touch()
        return good

    monkeypatch.setattr(live, "_made", scratch)
    for good in (True, False):
        fake = Fake(VDA)
        with capture(fake, tmp_path) as disks:
            disks.prepare(PARENT)
            disks.make_room()
            assert bool(list(tmp_path.iterdir())) == good
            disks.freeze_point()
        assert fake.orders[0].scratch_made == good
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("ours", "hint"), [(True, "vmckpt recover"), (False, "has ended")])
def test_an_open_backup_is_left_to_whoever_opened_it(tmp_path: Path, ours: bool, hint: str) -> None:
    fake = Fake(VDA)
    fake.open = OpenBackup(socket="/x/s.nbd", disks=(), ours=ours)
    with (
        pytest.raises(HypervisorError, match=f"another backup .*{hint}"),
        capture(fake, tmp_path) as disks,
    ):
        disks.prepare(PARENT)

    assert fake.did == []


@pytest.mark.parametrize("published", [True, False])
def test_recovery_puts_back_what_a_dead_capture_has_left(published: bool) -> None:
    fake = Fake()
    undo = DiskUndo(guest="u", snapshot="s-2", socket="/x/vmckpt-s-2.nbd", files=("/x",))
    put_back(fake, DiskUndo.from_json(undo.to_json()), published=published)

    assert fake.did == (["end"] if published else ["end", "forget vmckpt-s-2"])


@pytest.mark.parametrize(
    "text", ["{}", "[]", "4", '{"guest": 1, "snapshot": "s", "files": []}', '{"files": 7}', "x"]
)
def test_facts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"undo record|Expecting"):
        DiskUndo.from_json(text)


class Breaking(Fake):
    """libvirt breaks while the end is asked for."""

    ending: list[HypervisorError]

    def end(self, socket: str, *, limit: Seconds = Seconds(1.0)) -> bool:
        if self.ending:
            raise self.ending.pop(0)
        return super().end(socket, limit=limit)


@pytest.mark.parametrize(
    ("ending", "whole"),
    [
        ([OutcomeUnknown("alpha: the connection broke", host="alpha")], True),
        ([OutcomeUnknown("alpha: it broke", host="alpha")] * 2, False),
        ([HypervisorError("alpha: it does not end", host="alpha")], False),
    ],
)
def test_what_cannot_be_ended_is_told(
    tmp_path: Path, ending: list[HypervisorError], whole: bool
) -> None:
    libvirt = Breaking(VDA)
    libvirt.ending = []
    made = capture(libvirt, tmp_path)
    made.prepare(None)
    made.freeze_point()
    libvirt.ending = list(ending)
    with pytest.raises(CaptureFailed if not whole else StoreError) as caught, made:
        raise StoreError("the store is full")
    assert caught.value.undone is whole
    assert caught.value.message.startswith("the store is full")


def test_nobody_else_reads_what_is_kept_aside(tmp_path: Path) -> None:
    """It is a part of the guest's disk, in a folder that everybody may pass."""
    assert live._made(str(tmp_path / "scratch"), MIB)
    assert (tmp_path / "scratch").stat().st_mode & 0o777 == 0o600
