"""Requests to a running agent: one JSON object per line, over a root-only Unix socket."""

import json
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from vmckpt.errors import RemoteError
from vmckpt.units import Seconds

SOCKET = "control.sock"
_LONGEST = 1 << 20
_CLIENT = Seconds(5.0)

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


class Control:
    """A server that answers requests until it is closed. Use as `with Control(folder, answer)`."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        self._path, self._answer = folder / SOCKET, answer
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)
        self._socket.listen(8)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed:
            try:
                asker, _ = self._socket.accept()
            except OSError:
                return
            # An invalid request must not prevent later requests from being answered.
            with asker, suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
                asker.settimeout(_CLIENT)
                told = json.loads(_line(asker))
                asker.sendall(json.dumps(self._answer(told)).encode() + b"\n")


def ask(folder: Path, what: Mapping[str, Any], limit: Seconds = _CLIENT) -> dict[str, Any]:
    """Send a request to the agent whose socket is in a directory, and return its answer.

    `limit`: time to wait for each step, in seconds. Raises RemoteError if no agent answers, or if
    the answer is not a JSON object.
    """
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(limit)
        try:
            asker.connect(str(folder / SOCKET))
            asker.sendall(json.dumps(what).encode() + b"\n")
            told = json.loads(_line(asker))
        except (OSError, ValueError) as exc:
            raise RemoteError(f"no agent answers at {folder}: {exc}") from exc
    if not isinstance(told, dict):
        raise RemoteError(f"the agent at {folder} returned an invalid answer")
    return told


def _line(peer: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _LONGEST:
        more = peer.recv(1 << 16)
        if not more:
            break
        data += more
    return data


class Request(StrEnum):
    """A request to the loop of an agent."""

    END = "end"
    """End the protection; the guest keeps running where it is."""
    PLANNED = "planned"
    """Switch over to the backup without loss."""
    FAILOVER = "failover"
    """Fail over: the controller declares the primary dead."""
    TEST = "test"
    """Run a copy of the guest beside the standby."""
    END_TEST = "end-test"
    RUN_UNPROTECTED = "alone"
    """Run unprotected; the standby may not take over until it is complete again."""


class Requests:
    """The pending requests: one thread adds requests, another thread handles them."""

    def __init__(self) -> None:
        self._set: set[Request] = set()
        self._changed = threading.Condition()

    def add(self, request: Request) -> None:
        with self._changed:
            self._set.add(request)
            self._changed.notify_all()

    def drop(self, request: Request) -> None:
        """Remove a request that cannot be fulfilled."""
        with self._changed:
            self._set.discard(request)

    def has(self, request: Request) -> bool:
        return request in self._set

    @property
    def any(self) -> bool:
        """Whether any request is pending."""
        return bool(self._set)

    def wait(self, limit: Seconds) -> bool:
        """Wait at most `limit` seconds for a request. Returns whether a request is pending."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._set), limit)
