"""A restore's images: the new ones all in place, or those from before, whenever it breaks off."""

import io
import os
from pathlib import Path
from typing import cast

import pytest

from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.restore.files import Images
from vmckpt.model.disk import StorePlace
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.metadata import DiskMake, PrivateFacts
from vmckpt.store.format.private_part import Private
from vmckpt.util.host_files import Folder

ID = "s-aaaaaaaaaaaaaaaa"


def work(folder: Path, *, replace: bool = True) -> Images:
    order = RestoreOrder(
        guest="u", uri="", host="alpha", store=StorePlace(name="near", url="/x"), state="/x",
        snapshot=ID, data_key=None, trusted=(), xml=None,
        images={name: str(folder / name) for name in ("vda", "vdb")},
        replace=replace, links_down=False, paused=False,
    )  # fmt: skip
    makes = tuple(DiskMake(target=n, format="raw", size=1, options="") for n in ("vda", "vdb"))
    facts = PrivateFacts(domain_xml="", cpu_xml=None, boot_files=(), ram=(), disks=makes)
    private = Private(facts=facts, chunks=[], regions=(), files={})
    return Images(
        order, private, cast("Reader", None), ControllerChannel(io.StringIO(), io.StringIO())
    )


def written(folder: Path, *, before: bool = True) -> None:
    """As after `write`."""
    for name in ("vda", "vdb"):
        if before:
            (folder / name).write_text("before")
        (folder / f"{name}.{ID}.new").write_text("restored")


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_all_are_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    written(tmp_path)
    with work(tmp_path) as images_:
        images_.swap()
        images_.keep()
    assert contents(tmp_path) == {"vda": "restored", "vdb": "restored"}


def test_a_guest_that_did_not_start_gets_its_images_back(tmp_path: Path) -> None:
    written(tmp_path)
    with work(tmp_path) as images_:
        images_.swap()
    assert contents(tmp_path) == {"vda": "before", "vdb": "before"}


@pytest.mark.parametrize("failing", range(4))
def test_whichever_rename_fails_the_images_are_those_from_before(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    rename, count = Folder.rename, iter(range(10))

    def once(self: Folder, old: str, new: str) -> None:
        if next(count) == failing:
            raise OSError("no")
        rename(self, old, new)

    monkeypatch.setattr(Folder, "rename", once)
    images_ = work(tmp_path)
    images_.marks()
    with pytest.raises(OSError, match="no"), images_:
        images_.swap()
    assert contents(tmp_path) == {"vda": "before", "vdb": "before"}


def test_a_fork_that_did_not_start_leaves_none(tmp_path: Path) -> None:
    written(tmp_path, before=False)
    with work(tmp_path, replace=False) as images_:
        images_.swap()
    assert contents(tmp_path) == {}


def test_an_image_has_the_owner_that_its_place_had_when_the_guest_was_gone(tmp_path: Path) -> None:
    written(tmp_path)
    with work(tmp_path) as images_:
        # libvirt gives images back to their owners when a guest ends.
        os.chown(tmp_path / "vda", 1234, 1234)
        (tmp_path / "vda").chmod(0o640)
        images_.swap()
        images_.keep()
    told = (tmp_path / "vda").stat()
    assert (told.st_uid, told.st_gid, told.st_mode & 0o777) == (1234, 1234, 0o640)
