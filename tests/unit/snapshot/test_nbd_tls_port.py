"""Disks on a loopback port: only who has the key reads them."""

import os
import secrets
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nbd_peers import run
from tests.support.processes import command_lines
from vmckpt.capture.nbd.client import Client
from vmckpt.capture.nbd.protocol import Tcp
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput, HypervisorError, VmckptError
from vmckpt.snapshot import nbd_tls_port
from vmckpt.snapshot.nbd_tls_port import Port
from vmckpt.units import MIB

CONTENT = os.urandom(MIB) + bytes(MIB)


def export(data: bytes) -> Export:
    return Export(len(data), lambda at, length: data[at : at + length])


EXPORTS = {"vda": export(CONTENT), "v,d b": export(CONTENT[::-1])}


@pytest.fixture
def port() -> Iterator[Port]:
    with nbd_tls_port.served(EXPORTS, Tcp("127.0.0.1", 0)) as made:
        yield made
    assert not made.key_directory.exists()


def convert(port: Port, export: str, copy: Path, *, key: Path | None = None) -> str:
    """Copy with qemu-img: what it complains about."""
    words = port.qemu_options(export)
    if key is not None:
        words = words.replace(str(port.key_directory), str(key))
    first, given, second, image = words.split(" ", 3)
    done = subprocess.run(
        ["qemu-img", "convert", "-O", "raw", first, given, second, image, copy],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stderr


def test_who_has_the_key_reads_all_disks(port: Port, tmp_path: Path) -> None:
    for name, content in (("vda", CONTENT), ("v,d b", CONTENT[::-1])):
        assert convert(port, name, tmp_path / "copy") == ""
        assert (tmp_path / "copy").read_bytes() == content
    assert port.uri("v,d b").startswith(f"nbds://qemu@{port.place}/v%2Cd%20b?tls-psk-file=/")


def test_the_key_is_in_a_directory_and_a_file_of_our_own(port: Port) -> None:
    (key,) = port.key_directory.glob("*.psk")
    assert stat.S_IMODE(port.key_directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    secret = key.read_text().strip().partition(":")[2]
    assert len(secret) == 64
    lines = command_lines()
    assert any(b"qemu-storage-daemon" in line for line in lines.values())
    assert all(secret.encode() not in line for line in lines.values())


def test_who_has_none_or_another_one_reads_nothing(port: Port, tmp_path: Path) -> None:
    with pytest.raises(HypervisorError, match="TLS required"):
        Client(port.place, "vda", host="here")
    (tmp_path / "keys.psk").write_text(f"qemu:{secrets.token_hex(32)}\n")
    assert "TLS handshake failed" in convert(port, "vda", tmp_path / "copy", key=tmp_path)
    bare = ["qemu-img", "convert", "-O", "raw", f"nbd://{port.place}/vda", str(tmp_path / "copy")]
    assert subprocess.run(bare, capture_output=True, check=False).returncode != 0
    assert not (tmp_path / "copy").exists() or CONTENT[:512] not in (tmp_path / "copy").read_bytes()


def test_nothing_can_be_written(port: Port) -> None:
    words = port.qemu_options("vda").split(" ", 3)
    done = subprocess.run(
        ["qemu-io", *words, "-c", "write 0 64k"], capture_output=True, text=True, check=False
    )
    assert "Permission denied" in done.stderr


def test_it_listens_on_this_machine_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for place, why in (
            (Tcp("0.0.0.0", 0), "other machines"),
            (Tcp("example.org", 0), "the host is not an IP address"),
            (Tcp("127.0.0.1", taken.getsockname()[1]), "cannot listen on"),
        ):
            with pytest.raises(BadInput, match=why), nbd_tls_port.served(EXPORTS, place):
                pass


def test_what_serves_may_die(port: Port) -> None:
    port.must_live()
    port._daemon.kill()
    port._daemon.wait()
    with pytest.raises(VmckptError, match=r"127\.0\.0\.1:\d+ is no longer served"):
        port.must_live()


def test_a_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        pytest.raises(BadInput, match="install qemu-system-common"),
        nbd_tls_port.served(EXPORTS, Tcp("127.0.0.1", 0)),
    ):
        pass


@pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o755, False), (0o770, False)])
def test_a_runtime_directory_is_used_if_it_is_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, used: bool
) -> None:
    place = tmp_path / "run"
    place.mkdir()
    place.chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    with nbd_tls_port.own_directory() as made:
        assert (made.parent == place) is used
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert not made.exists()


def test_the_runtime_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run"
    place.mkdir(mode=0o700)
    run("chown", "nobody", place)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    with nbd_tls_port.own_directory() as made:
        assert made.parent != place
