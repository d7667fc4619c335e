"""A restored disk that stays an overlay of its base image."""

import subprocess
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from vmckpt.agent.restore import base_images
from vmckpt.agent.restore.base_images import BaseImage, Comparison
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.server import Server
from vmckpt.capture.nbd.session import ABSENT, DATA, ZEROS, Export
from vmckpt.errors import BadInput
from vmckpt.units import MIB

UNIT = 65536


def filled(*units: int) -> bytes:
    """Bytes with one unit of each value."""
    return b"".join(bytes([one]) * UNIT for one in units)


def image(path: Path, content: bytes, *words: str) -> Path:
    raw = path.with_suffix(".raw")
    raw.write_bytes(content)
    told = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", *words, str(raw), str(path)]
    subprocess.run(told, check=True)
    raw.unlink()
    return path


def runs(content: bytes) -> Callable[[int, int], Iterator[tuple[int, bool]]]:
    def zeros(offset: int, length: int) -> Iterator[tuple[int, bool]]:
        for at in range(offset // UNIT * UNIT, offset + length, UNIT):
            begin, end = max(at, offset), min(at + UNIT, offset + length, len(content))
            yield end - begin, not any(content[at : at + UNIT])

    return zeros


def compared(
    content: bytes, base: BaseImage, folder: Path, **words: object
) -> list[tuple[int, int]]:
    with base_images.opened(base, folder / "base.sock", "alpha") as client:
        told = Comparison(
            lambda at, count: content[at : at + count], runs(content),
            len(content), client, lambda: bool(words.get("stopped")),
        )  # fmt: skip
        return list(told.kinds(0, len(content)))


BASE = filled(1, 2, 0, 3, 0)


def test_only_what_differs_is_data(tmp_path: Path) -> None:
    base = BaseImage(str(image(tmp_path / "base.qcow2", BASE)), "qcow2")
    disk = filled(1, 9, 0, 0, 7, 0, 5)
    kinds = compared(disk, base, tmp_path)
    assert kinds == [
        (UNIT, ABSENT), (UNIT, DATA), (UNIT, ABSENT), (UNIT, ZEROS), (UNIT, DATA), (UNIT, ABSENT),
        (UNIT, DATA),
    ]  # fmt: skip
    assert list(accumulate(count for count, _ in kinds))[-1] == len(disk)


def test_the_last_unit_may_be_short(tmp_path: Path) -> None:
    base = BaseImage(str(image(tmp_path / "base.qcow2", filled(1, 2))), "qcow2")
    disk = filled(1, 2)[:-512]
    assert compared(disk, base, tmp_path) == [(len(disk), ABSENT)]
    larger = filled(1, 2) + b"\x05" * 512
    assert compared(larger, base, tmp_path) == [(2 * UNIT, ABSENT), (512, DATA)]


def test_qemu_img_leaves_to_the_base_what_is_absent(tmp_path: Path) -> None:
    base = image(tmp_path / "base.qcow2", filled(*range(1, 65)))
    disk = filled(*range(1, 33), 0, 77, *range(35, 65), 8)
    new = tmp_path / "new.qcow2"
    with base_images.opened(BaseImage(str(base), "qcow2"), tmp_path / "b", "alpha") as client:
        told = Comparison(
            lambda at, count: disk[at : at + count], runs(disk),
            len(disk), client, lambda: False,
        )  # fmt: skip
        export = Export(len(disk), lambda at, count: disk[at : at + count], told.kinds)
        with Server({"": export}, Unix(str(tmp_path / "s"))) as server:
            subprocess.run(
                ["qemu-img", "convert", "-W", "-f", "raw", "-O", "qcow2", "-B", str(base), "-F",
                 "qcow2", server.uri(), str(new)],
                check=True,
            )  # fmt: skip
    flat = tmp_path / "flat.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", str(new), str(flat)], check=True)
    assert flat.read_bytes() == disk
    assert new.stat().st_size < MIB, "only two units were written"


def test_an_image_that_is_stopped_or_locked_is_an_error(tmp_path: Path) -> None:
    path = image(tmp_path / "base.qcow2", BASE)
    base = BaseImage(str(path), "qcow2")
    with pytest.raises(OSError, match="stopped"):
        compared(BASE, base, tmp_path, stopped=True)
    with pytest.raises(BadInput, match="cannot be opened"):
        compared(BASE, BaseImage(str(path), "vmdk"), tmp_path)


def reason(base: BaseImage, *, format_: str = "qcow2", written: str = "/none", **users: str) -> str:
    told = {path: (guest, "qcow2") for guest, path in users.items()}
    try:
        base_images.require_usable(base, format_, [written], told)
    except BadInput as exc:
        return exc.message
    return ""


def test_a_base_that_a_guest_writes_is_not_used(tmp_path: Path) -> None:
    below = image(tmp_path / "below.qcow2", BASE)
    above = image(tmp_path / "above.qcow2", BASE, "-B", str(below), "-F", "qcow2")
    base = BaseImage(str(above), "qcow2")
    assert reason(base) == ""
    assert reason(base, web2=str(tmp_path / "other")) == ""
    assert reason(base, web2=str(above)) == f"guest web2 uses {above} as its disk"
    assert reason(base, web2=str(below)) == f"guest web2 uses {below} as its disk"
    assert reason(base, written=str(below)) == f"{below} is replaced by the same restore"
    as_backing_file = {str(above): ("web2", ""), str(below): ("web3", "")}
    base_images.require_usable(base, "qcow2", [], as_backing_file)
    assert "format raw" in reason(base, format_="raw")
    assert reason(BaseImage(str(above), "qcow2", "it is elsewhere")) == "it is elsewhere"


def test_a_base_that_is_missing_broken_or_a_link_is_not_used(tmp_path: Path) -> None:
    path = image(tmp_path / "base.qcow2", BASE)
    missing = tmp_path / "missing.qcow2"
    assert reason(BaseImage(str(missing), "qcow2")) == f"{missing} is not on this host"
    link = tmp_path / "link.qcow2"
    link.symlink_to(path)
    assert "not a regular file" in reason(BaseImage(str(link), "qcow2"))
    path.write_bytes(b"none")
    assert "cannot be opened" in reason(BaseImage(str(path), "qcow2"))
