"""What becomes of images once their guest has arrived: old ones go only if nobody has them."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.shell import Shell
from vmckpt.errors import HypervisorError, LeaseLost, RemoteError
from vmckpt.hypervisor import storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.storage import User
from vmckpt.migration.plan import storage_cleanup
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.migration.plan.storage_cleanup import Tidied
from vmckpt.model.disk import CopyPlan, DiskCopy
from vmckpt.remote import images, probe
from vmckpt.remote.ssh import COMMAND_LIMIT, Answer
from vmckpt.units import MIB, Bytes, Seconds


class Scene:
    """An image on a source, and its copy on a target."""

    def __init__(self, folder: Path) -> None:
        self.there: dict[str, User] = {}
        """What guests of the source have."""
        self.folder, self.old, self.new = folder, folder / "old.raw", folder / "new.raw"
        self.old.write_bytes(bytes(MIB))
        self.new.write_bytes(bytes(1))
        self.remotes: Remotes = (Shell(folder), Shell(folder))
        self.lost = False

    def plan(self, *, removes: bool = True, full: bool = False) -> CopyPlan:
        copy = DiskCopy(
            name="vda", source=str(self.old), path=str(self.new), format="raw", size=Bytes(MIB),
            needed=Bytes(MIB), allocated=Bytes(MIB), full=full, options="", mode="600",
        )  # fmt: skip
        return CopyPlan(copies=(copy,), removes=removes)

    async def marks(self) -> dict[str, str]:
        return await storage_cleanup.marks(self.remotes, self.plan(), runs=False)

    async def finish(self, marks: dict[str, str] | None = None, *, full: bool = False) -> Tidied:
        old = await self.marks() if marks is None else marks
        here = Hypervisor(self.remotes[0].host)
        return await storage_cleanup.finish(
            self.plan(full=full), old, here, self.remotes, self.check
        )

    async def keeps(self, why: str, marks: dict[str, str] | None = None) -> None:
        """It does not go, and the reason is told."""
        done = await self.finish(marks)
        assert (done.removed, done.troubles) == ((), ())
        assert [why in one for one in done.stays] == [True], done.stays
        assert str(self.old) in done.stays[0]
        assert self.old.exists()

    def check(self) -> None:
        if self.lost:
            raise LeaseLost("another controller has it")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(tmp_path)

    async def of_all(_: object) -> dict[str, User]:
        return made.there

    monkeypatch.setattr(storage, "of_all", of_all)
    return made


async def test_the_old_image_goes(scene: Scene) -> None:
    assert await scene.finish() == Tidied(removed=(str(scene.old),))
    assert (scene.old.exists(), scene.new.exists()) == (False, True)


async def test_without_the_policys_leave_it_stays(scene: Scene) -> None:
    marks = await storage_cleanup.marks(scene.remotes, scene.plan(removes=False), runs=True)
    assert await scene.finish(marks) == Tidied()
    assert scene.old.exists()


async def test_a_raw_image_that_is_to_be_full_gets_its_room(scene: Scene) -> None:
    assert (await scene.finish(full=True)).troubles == ()
    assert scene.new.stat().st_blocks * 512 >= MIB


@pytest.mark.parametrize("way", ["itself", "by a link", "by a hard link", "below", "data file"])
async def test_one_that_a_guest_there_has_stays(scene: Scene, way: str) -> None:
    """Also one that is off, whose definition does not say what its image lies on."""
    path, kind = scene.old, "raw"
    if way == "by a link":
        path = scene.folder / "link"
        path.symlink_to(scene.old)
    elif way == "by a hard link":
        path = scene.folder / "link"
        path.hardlink_to(scene.old)
    elif way != "itself":
        path, kind = scene.folder / "clone.qcow2", "qcow2"
        below = ["-b", scene.old, "-F", "raw"]
        more = below if way == "below" else ["-o", f"data_file={scene.old},data_file_raw=on"]
        make = ["qemu-img", "create", "-q", "-f", "qcow2", *more, path, "1M"]
        await asyncio.to_thread(subprocess.run, make, check=True)
    other = User("a", "raw")
    scene.there = {str(scene.new): other, str(path): User("b", kind), "/not/there": other}
    await scene.keeps("guest b uses it")


async def test_an_image_whose_base_is_gone_keeps_nobody(scene: Scene) -> None:
    """Its guest cannot be started any more; such are forgotten on many a host."""
    base, clone = scene.folder / "base.qcow2", scene.folder / "clone.qcow2"
    for more in ([str(base), "1M"], ["-b", str(base), "-F", "qcow2", str(clone)]):
        make = ["qemu-img", "create", "-q", "-f", "qcow2", *more]
        await asyncio.to_thread(subprocess.run, make, check=True)
    scene.there = {str(clone): User("b", "qcow2")}
    base.write_text("no image any more")
    await scene.keeps("cannot read an image")
    base.unlink()
    assert (await scene.finish()).removed == (str(scene.old),)


async def test_firmware_of_a_guest_that_runs_goes_too(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has its own file of it, and that of the source would bar the way back."""
    vars_, same = scene.folder / "vars.fd", False

    async def same_files(*_: object) -> dict[str, bool]:
        return {str(vars_): same}

    monkeypatch.setattr(probe, "same_files", same_files)
    vars_.write_bytes(bytes(1))
    mark = (await scene.marks())[str(scene.old)]

    async def known(_: object, paths: list[str], *, held: bool = False) -> dict[str, str]:
        assert held == (str(scene.old) in paths)
        return dict.fromkeys(paths, mark)

    monkeypatch.setattr(images, "marks", known)
    nvram = str(vars_)
    marks = await storage_cleanup.marks(scene.remotes, scene.plan(), runs=True, nvram=nvram)
    assert list(marks) == [str(scene.old), nvram]
    same = True
    marks = await storage_cleanup.marks(scene.remotes, scene.plan(), runs=True, nvram=nvram)
    assert list(marks) == [str(scene.old)]


async def test_a_running_guest_with_another_file_open_keeps_this_one(scene: Scene) -> None:
    """Somebody has put a file in its image's place, for its next start."""
    marks = await storage_cleanup.marks(scene.remotes, scene.plan(), runs=True)
    await scene.keeps("the guest has a different file open", marks)


async def test_where_images_cannot_be_told_apart_they_stay(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object, **__: object) -> dict[str, str]:
        raise RemoteError("alpha: qemu-io is not installed")

    monkeypatch.setattr(images, "marks", refuses)
    await scene.keeps("qemu-io is not installed")


async def test_where_an_image_of_another_guest_cannot_be_read_all_stays(scene: Scene) -> None:
    scene.there = {str(scene.new): User("b", "qcow2")}
    await scene.keeps("cannot read an image")


async def test_another_file_of_that_name_stays(scene: Scene) -> None:
    marks = await scene.marks()
    scene.old.rename(scene.folder / "kept")
    scene.old.write_text("somebody else's")
    await scene.keeps("the file was replaced meanwhile", marks)


async def test_a_link_stays_and_what_it_leads_to(scene: Scene) -> None:
    itself = scene.old.rename(scene.folder / "itself")
    scene.old.symlink_to(itself)
    await scene.keeps("not a regular file")
    assert scene.old.is_symlink()


class Mounted(Shell):
    """A host on which every file system is of one kind."""

    async def run(
        self, args: Sequence[str], *, text: str = "", limit: Seconds = COMMAND_LIMIT
    ) -> Answer:
        return await super().run(args, text=f"PATH={self.folder}:$PATH\n{text}", limit=limit)


async def test_what_other_hosts_may_have_stays(scene: Scene) -> None:
    """Their guests are not asked."""
    fake = scene.folder / "stat"
    fake.write_text('#!/bin/sh\n[ "$1" = -f ] && echo nfs || exec /usr/bin/stat "$@"\n')
    fake.chmod(0o755)
    said = await images.marks(Mounted(scene.folder), [str(scene.old)])
    await scene.keeps("shared with other hosts: its file system is nfs", said)


async def test_one_that_a_qemu_has_open_stays(scene: Scene, tmp_path: Path) -> None:
    drive = f"if=none,id=d,format=raw,file={scene.old}"
    qemu = [
        "qemu-system-x86_64", "-S", "-display", "none", "-m", "64", "-drive", drive, "-device",
        "virtio-blk-pci,drive=d", "-pidfile", str(tmp_path / "pid"), "-daemonize",
    ]  # fmt: skip
    await asyncio.to_thread(subprocess.run, qemu, check=True)
    try:
        await scene.keeps("a QEMU has it open")
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)


async def test_the_reason_why_an_image_stays_is_shown_unchanged(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def remove(*_: object) -> dict[str, str]:
        return {str(scene.old): "cannot open (busy)"}

    monkeypatch.setattr(images, "remove", remove)
    done = await scene.finish()
    assert done.stays == (f"{scene.old} is still on alpha: cannot open (busy)",)


async def test_it_stays_while_its_copy_may_not_be_on_its_disk(scene: Scene) -> None:
    scene.new.unlink()
    await scene.keeps(f"cannot sync {scene.new} to disk: ")


async def test_whose_move_it_is_no_more_removes_nothing(scene: Scene) -> None:
    scene.lost = True
    await scene.keeps("another controller")


async def test_where_guests_cannot_be_asked_it_stays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(_: object) -> dict[str, User]:
        raise HypervisorError("it does not answer", host="alpha")

    monkeypatch.setattr(storage, "of_all", silent)
    await scene.keeps("may still be on alpha: it does not answer")


@pytest.mark.parametrize("logins", [True, False])
async def test_after_a_crash_it_stays_and_is_named(scene: Scene, logins: bool) -> None:
    """A guest may have gone on from it since: who was not there cannot tell."""
    intent = storage_cleanup.meant(scene.plan(full=True))
    told = await storage_cleanup.after_crash(intent, "alpha", scene.remotes if logins else None)
    assert (scene.new.stat().st_blocks * 512 >= MIB) == logins
    assert [str(scene.old) in one for one in told] == ([True] if logins else [False, True])
    assert scene.old.exists()


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("/a", ["/a"]),
        ("file:/a", ["/a"]),
        ("rbd:pool/volume", []),
        ("nbd://beta:10809/a", []),
        ('json:{"driver": "qcow2", "file": {"driver": "file", "filename": "/a"}}', ["/a"]),
        ('json:{"driver": "raw", "file.filename": "/a"}', ["/a"]),
    ],
)
def test_files_behind_what_qemu_calls_a_file_name(name: str, files: list[str]) -> None:
    assert list(images.below(json.dumps([{"filename": name}]))) == files


@pytest.mark.parametrize(
    "told",
    [
        "",
        "[1]",
        '[{"filename": "a.raw"}]',
        '[{"filename": "json:{"}]',
        '[{"filename": 3}]',
        '{"a": 1}',
    ],
)
def test_nonsense_of_qemu_img_is_refused(told: str) -> None:
    with pytest.raises(RemoteError, match="invalid answer from qemu-img"):
        list(images.below(told))
