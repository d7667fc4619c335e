"""Images that are made on a target: whenever the controller dies, nothing of them stays."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.following import words
from tests.support.shell import Shell
from vmckpt.errors import RemoteError
from vmckpt.migration.plan import storage_copy
from vmckpt.model.disk import CopyPlan, DiskCopy, Made
from vmckpt.remote import images
from vmckpt.units import MIB, Bytes

SUFFIX = "vmckpt-1"


def plan(folder: Path) -> CopyPlan:
    copies = [
        DiskCopy(
            name=name, source=f"/{name}", path=str(folder / f"{name}.qcow2"), format="qcow2",
            size=Bytes(MIB), needed=Bytes(MIB), allocated=Bytes(MIB), full=False,
            options="", mode="640",
        )
        for name in ("vda", "vdb")
    ]  # fmt: skip
    return CopyPlan(copies=tuple(copies))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def unknown(made: Made) -> Made:
    """What recovery knows of them when the marks are not in the journal."""
    return Made(host=made.host, suffix=made.suffix, marks=dict.fromkeys(made.marks, ""))


async def test_an_image_gets_its_path_last(tmp_path: Path) -> None:
    host = Shell(tmp_path)
    made = await storage_copy.prepare(host, plan(tmp_path), SUFFIX)
    assert names(tmp_path) == ["vda.qcow2.vmckpt-1", "vdb.qcow2.vmckpt-1"]
    await images.publish(host, made)
    assert names(tmp_path) == ["vda.qcow2", "vdb.qcow2"]
    assert (tmp_path / "vda.qcow2").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "vda.qcow2").stat().st_nlink == 1
    assert await images.remove(host, made) == {}
    assert names(tmp_path) == []


async def test_killed_before_the_marks_are_known(tmp_path: Path) -> None:
    host = Shell(tmp_path)
    made = await storage_copy.prepare(host, plan(tmp_path), SUFFIX)
    (tmp_path / "vda.qcow2").write_text("somebody else's")
    assert await images.remove(host, unknown(made)) == {}
    assert names(tmp_path) == ["vda.qcow2"]


async def test_killed_between_the_two_names(tmp_path: Path) -> None:
    host = Shell(tmp_path)
    made = await storage_copy.prepare(host, plan(tmp_path), SUFFIX)
    (tmp_path / "vda.qcow2").hardlink_to(tmp_path / "vda.qcow2.vmckpt-1")
    assert await images.remove(host, made) == {}
    assert names(tmp_path) == []


async def test_a_file_that_came_meanwhile_stays(tmp_path: Path) -> None:
    host = Shell(tmp_path)
    made = await storage_copy.prepare(host, plan(tmp_path), SUFFIX)
    (tmp_path / "vdb.qcow2").write_text("somebody else's")
    with pytest.raises(RemoteError, match=r"cannot create .*vdb\.qcow2: File exists") as caught:
        await images.publish(host, made)
    assert caught.value.host == "alpha"
    assert await images.remove(host, made) == {}
    assert names(tmp_path) == ["vdb.qcow2"]
    assert (tmp_path / "vdb.qcow2").read_text() == "somebody else's"


async def test_one_that_was_put_in_its_place_later_is_named(tmp_path: Path) -> None:
    host = Shell(tmp_path)
    made = await storage_copy.prepare(host, plan(tmp_path), SUFFIX)
    await images.publish(host, made)
    (tmp_path / "vda.qcow2").unlink()
    (tmp_path / "other").write_text("restored by hand")
    (tmp_path / "other").rename(tmp_path / "vda.qcow2")
    path, why = f"{tmp_path}/vda.qcow2", "the file was replaced meanwhile"
    assert await images.remove(host, made) == {path: why}
    assert await storage_copy.remove(host, made) == (f"{path} ({why})",)
    assert names(tmp_path) == ["vda.qcow2"]


async def test_none_stays_when_one_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "vdb.qcow2.vmckpt-1").mkdir()
    with pytest.raises(RemoteError, match=r"cannot create .*vdb\.qcow2: "):
        await storage_copy.prepare(Shell(tmp_path), plan(tmp_path), SUFFIX)
    assert names(tmp_path) == ["vdb.qcow2.vmckpt-1"]


def test_an_answer_of_qemu_img_that_is_no_json_is_shown_by_the_command_of_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, program = tmp_path / "of web.qcow2", tmp_path / "qemu-img"
    image.touch()
    program.write_text('#!/bin/sh\necho "$@: licence expired"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RemoteError, match="invalid answer from qemu-img") as caught:
        asyncio.run(images.describe(Shell(tmp_path), str(image), "qcow2"))
    shown = subprocess.run(words(str(caught.value)), capture_output=True, text=True, check=True)
    assert shown.stdout == f"info -U --output=json -f qcow2 {image}: licence expired\n"
