"""Where an image is served to the host that fills it."""

import json
import subprocess
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
        )  # fmt: skip
        running.stdin.close()
        assert running.wait() == 0
    found = {line.split()[3].rpartition(":")[0] for line in listed.stdout.splitlines()}
    assert found == ({heard} if heard != "*" else {"0.0.0.0", "[::]"})
