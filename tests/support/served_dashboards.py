"""A dashboard that is served to browsers, in a process of its own."""

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A dashboard that is served: where, and its token."""
    port = free_port()
    prepare = getattr(request, "param", None)
    words = [sys.executable, "-m", "vmckpt.cli.app", "dashboard", "--simulate", "4x12", "--serve"]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*words, "--port", str(port)], stdout=out, stderr=out, start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - this process has no other thread then
        )  # fmt: skip
    try:
        found = None
        for _ in range(300):
            found = re.search(r"(http://\S+)/\?token=(\S+)", log.read_text())
            if found is not None:
                break
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        assert found is not None, log.read_text()
        yield found[1], found[2]
    finally:
        process.terminate()
        assert process.wait(10) is not None
