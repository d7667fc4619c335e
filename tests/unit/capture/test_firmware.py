"""NVRAM and TPM state: where they are, where they go, and how they are put there."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import within
from vmckpt.agent.restore.files import SmallFiles
from vmckpt.capture import firmware
from vmckpt.errors import BadInput, HypervisorError

UUID = "3e6f1c52-0000-4000-8000-000000000001"
ID = "s-aaaaaaaaaaaaaaaa"


def xml(nvram: str = "", devices: str = "") -> str:
    return (
        f"<domain type='qemu'><name>web1</name><uuid>{UUID}</uuid><os>{nvram}</os>"
        f"<devices>{devices}</devices></domain>"
    )


PLAIN = "<nvram template='/t'>/var/lib/libvirt/qemu/nvram/web1_VARS.fd</nvram>"
NEWER = "<nvram type='file' format='qcow2'><source file='/srv/web1.qcow2'/></nvram>"
TPM = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>"


@pytest.mark.parametrize(
    ("described", "path", "own"),
    [
        (
            PLAIN,
            "/var/lib/libvirt/qemu/nvram/web1_VARS.fd",
            "/var/lib/libvirt/qemu/nvram/fork_VARS.fd",
        ),
        (NEWER, "/srv/web1.qcow2", "/srv/fork_VARS.qcow2"),
        ("<nvram type='network'><source protocol='iscsi' name='x'/></nvram>", None, None),
        ("", None, None),
    ],
)
def test_nvram_is_found_and_a_fork_gets_its_own(
    described: str, path: str | None, own: str | None
) -> None:
    told = xml(described)
    assert firmware.nvram(told) == path
    assert firmware.nvram(firmware.own_nvram(told, "fork")) == own


def test_each_file_has_its_place() -> None:
    told = xml(PLAIN, TPM)
    assert firmware.places(["nvram", "tpm/tpm2/state"], told, UUID) == {
        "nvram": "/var/lib/libvirt/qemu/nvram/web1_VARS.fd",
        "tpm/tpm2/state": f"/var/lib/libvirt/swtpm/{UUID}/tpm2/state",
    }
    assert firmware.places([], xml(), UUID) == {}


@pytest.mark.parametrize(
    "name", ["tpm/../../../etc/x", "tpm//etc/x", "tpm", "nvram/x", "etc", "../nvram", ""]
)
def test_a_file_of_another_name_goes_nowhere(name: str) -> None:
    with pytest.raises(ValueError, match="has no place for it"):
        firmware.places([name], xml(PLAIN, TPM), UUID)


def test_a_guest_without_it_has_no_place() -> None:
    with pytest.raises(ValueError, match="has no place for it"):
        firmware.places(["nvram"], xml(), UUID)


def test_they_are_read_on_their_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firmware, "_TPM_FOLDER", tmp_path)
    (tmp_path / "vars").write_bytes(b"boot order")
    (tmp_path / UUID / "tpm2").mkdir(parents=True)
    (tmp_path / UUID / "tpm2" / "state").write_bytes(b"keys")
    (tmp_path / UUID / "tpm2" / ".lock").write_bytes(b"")
    told = xml(f"<nvram>{tmp_path}/vars</nvram>", TPM)
    assert firmware.there(told, UUID)
    assert firmware.read(told, UUID, "alpha") == {"nvram": b"boot order", "tpm/tpm2/state": b"keys"}
    monkeypatch.setattr(firmware, "_LARGEST", 4)
    with pytest.raises(HypervisorError, match=r"vars has 10 B, and the limit .* is 4 B"):
        firmware.read(told, UUID, "alpha")
    assert firmware.read(xml("<nvram>/none/there</nvram>"), UUID, "alpha") == {}
    assert not firmware.there(xml(), UUID)


def test_a_fifo_that_takes_a_directorys_place_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firmware, "_TPM_FOLDER", tmp_path)
    (tmp_path / UUID / "tpm2").mkdir(parents=True)
    listed, stat = os.listdir, os.stat

    def swapped(at: int) -> list[str]:
        names = listed(at)
        (tmp_path / UUID / "tpm2").rmdir()
        os.mkfifo(tmp_path / UUID / "tpm2")
        return names

    def before(name: str, **how: Any) -> os.stat_result:
        return stat(tmp_path) if name == "tpm2" else stat(name, **how)

    monkeypatch.setattr(os, "listdir", swapped)
    monkeypatch.setattr(os, "stat", before)
    with within(20), pytest.raises(HypervisorError, match="Not a directory"):
        firmware.read(xml("", TPM), UUID, "alpha")


def test_directories_in_each_other_without_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firmware, "_TPM_FOLDER", tmp_path)
    (tmp_path / UUID / "/".join("a" * 12)).mkdir(parents=True)
    with pytest.raises(HypervisorError, match="too many nested directories"):
        firmware.read(xml("", TPM), UUID, "alpha")


def small(folder: Path, *, replace: bool = True) -> SmallFiles:
    places = {"nvram": str(folder / "vars"), "tpm/a": str(folder / "tpm" / "a")}
    return SmallFiles({"nvram": b"new", "tpm/a": b"new"}, places, ID, replace=replace)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_are_put_in_their_places(tmp_path: Path) -> None:
    (tmp_path / "vars").write_bytes(b"old")
    with small(tmp_path) as files:
        files.write()
        files.swap()
        files.keep()
    assert contents(tmp_path) == {"vars": b"new", "a": b"new"}


@pytest.mark.parametrize("far", [False, True])
def test_what_was_not_kept_is_taken_back(tmp_path: Path, far: bool) -> None:
    (tmp_path / "vars").write_bytes(b"old")
    with small(tmp_path) as files:
        files.write()
        if far:
            files.swap()
    assert contents(tmp_path) == {"vars": b"old"}
    assert not (tmp_path / "tpm").exists()


def test_a_fork_takes_nobodys_file(tmp_path: Path) -> None:
    (tmp_path / "vars").write_bytes(b"old")
    with pytest.raises(BadInput, match="already exists"), small(tmp_path, replace=False) as files:
        files.write()
    assert contents(tmp_path) == {"vars": b"old"}
    with pytest.raises(BadInput, match="gave no path"):
        SmallFiles({"nvram": b""}, {}, ID, replace=True)


def test_a_tpm_with_its_state_elsewhere_is_not_read() -> None:
    told = xml(
        devices="<tpm><backend type='emulator'><source type='file' path='/t'/></backend></tpm>"
    )
    assert firmware.tpm(told, UUID) is None
    assert not firmware.there(told, UUID)


def test_a_file_has_the_owner_that_its_place_had_when_the_guest_was_gone(tmp_path: Path) -> None:
    (tmp_path / "vars").write_bytes(b"old")
    with small(tmp_path) as files:
        files.write()
        os.chown(tmp_path / "vars", 1234, 1234)
        files.swap()
        files.keep()
    assert (tmp_path / "vars").stat().st_uid == 1234


def test_qemu_may_go_through_a_folder_that_was_missing_for_its_nvram(tmp_path: Path) -> None:
    place = tmp_path / "images" / "nvram" / "vars"
    with SmallFiles({"nvram": b"new"}, {"nvram": str(place)}, ID, replace=False) as files:
        files.write()
        files.swap()
        files.keep()
    assert place.parent.stat().st_mode & 0o777 == 0o711
    assert place.stat().st_mode & 0o777 == 0o600
