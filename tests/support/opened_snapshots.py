"""A snapshot whose disks are served by `vmckpt snapshot open`."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any


@contextmanager
def serving(*words: str) -> Iterator[dict[str, Any]]:
    """`snapshot open` of "one" in a process: what it says once it serves; then Ctrl-C."""
    server = subprocess.Popen(
        [sys.executable, "-m", "vmckpt.cli.app", "snapshot", "open", "one", "--json", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        for line in server.stderr:
            if line.startswith("serving read-only"):
                break
        yield first_value(server.stdout)
    finally:
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=30)
    assert (server.returncode, "stopped serving" in said) == (0, True), said


def first_value(stream: IO[str]) -> dict[str, Any]:
    """Of JSON that goes on no further, and whose stream stays open."""
    text = ""
    while line := stream.readline():
        text += line
        with suppress(ValueError):
            return dict(json.loads(text))
    raise AssertionError(text)
