"""Where an image is served to the host that fills it."""

import json
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from vmckpt.remote import image_copy


@pytest.mark.parametrize(("address", "heard"), [("127.0.0.1", "127.0.0.1"), ("localhost", "*")])
def test_a_name_that_leads_to_itself_is_heard_on_all_addresses(
    tmp_path: Path, address: str, heard: str
) -> None:
    """Debian has the host's own name at 127.0.1.1, where no other host finds it."""
    image = tmp_path / "image.raw"
    image.write_bytes(bytes(512))
    _, found = served(image, address)

    assert found == ({heard} if heard != "*" else {"0.0.0.0", "[::]"})


def test_a_port_that_is_taken_on_one_address_is_not_used(tmp_path: Path) -> None:
    """qemu-nbd would listen on IPv6 alone, where a source that asks by IPv4 does not find it."""
    image = tmp_path / "image.raw"
    image.write_bytes(bytes(512))
    with highest_free() as taken:
        not_this = taken.getsockname()[1]
        port, found = served(image, "localhost")

    assert port != not_this
    assert found == {"0.0.0.0", "[::]"}


def highest_free() -> socket.socket:
    """A listener at the port that would be tried first; other tests may have those above it."""
    for port in range(49215, 49151, -1):
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("no port is free")


def served(image: Path, address: str) -> tuple[int, set[str]]:
    """The port that an image is served at, and the addresses that listen there."""
    serve = ["sh", "-c", image_copy.SERVE, "sh", address, "raw", str(image)]
    pipe = subprocess.PIPE
    with subprocess.Popen(serve, stdin=pipe, stdout=pipe, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(json.dumps({"key": "00" * 32}) + "\n")
        running.stdin.flush()
        port = json.loads(running.stdout.readline())["port"]
        listed = subprocess.run(
            ["ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True, check=True
        )
        running.stdin.close()
        assert running.wait() == 0
    left = subprocess.run(["pgrep", "-f", f"^qemu-nbd .*--port={port} "], check=False)
    assert left.returncode == 1
    return port, {line.split()[3].rpartition(":")[0] for line in listed.stdout.splitlines()}
