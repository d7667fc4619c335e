"""A read-only NBD server for any data readable at an offset, on a socket with owner-only access.

Each client has its own threads, and data is read one MiB at a time. So a slow or silent client
delays no other client, and memory stays bounded.
"""

import logging
import os
import socket
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import quote

from vmckpt.capture.nbd.protocol import NbdSocket, Unix
from vmckpt.capture.nbd.session import Export, Session
from vmckpt.errors import BadInput

log = logging.getLogger("vmckpt.nbd")

MOST_CLIENTS = 16


class Server:
    """Serves exports by name until it is closed. Use as `with Server(...) as server`.

    The first export is also the default one, with an empty name. If an export's `read` raises
    OSError or VmckptError, the client gets an I/O error.
    """

    def __init__(
        self, exports: Mapping[str, Export], place: Unix, *, most: int = MOST_CLIENTS
    ) -> None:
        """Listen, and serve up to `most` clients in threads.

        Raises BadInput if the server cannot listen at `place`, and ValueError without exports.
        """
        if not exports:
            raise ValueError("no exports to serve")
        self._exports, self._most = {"": next(iter(exports.values())), **exports}, most
        self._socket, self.place = _listen(place), place
        self._sessions: dict[Session, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="NBD server", daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def uri(self, export: str = "") -> str:
        """Return the NBD URI of an export."""
        name = quote(export, safe="")
        return f"nbd+unix:///{name}?socket={quote(self.place.path)}"

    @property
    def clients(self) -> int:
        """Number of connected clients."""
        with self._lock:
            return len(self._sessions)

    def close(self) -> None:
        """Close all connections, and stop listening."""
        with self._lock:
            self._closed = True
            left = list(self._sessions.items())
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join()
        self._socket.close()
        for session, thread in left:
            session.hang_up()
            thread.join()
        Path(self.place.path).unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return
            if self.clients >= self._most:
                log.warning("%s: more than %d clients; client rejected", self.place, self._most)
                connected.close()
                continue
            session = Session(NbdSocket(connected), self._exports)
            thread = threading.Thread(
                target=self._serve, args=(session,), name="NBD client", daemon=True
            )
            with self._lock:
                if self._closed:
                    connected.close()
                    return
                self._sessions[session] = thread
                thread.start()

    def _serve(self, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                del self._sessions[session]


def _listen(place: Unix) -> socket.socket:
    _clear(place.path)
    made = socket.socket(socket.AF_UNIX)
    try:
        # The mode is set before the socket gets its path, so that only the owner can ever connect.
        os.fchmod(made.fileno(), 0o600)
        made.bind(place.path)
        made.listen(MOST_CLIENTS)
    except OSError as exc:
        made.close()
        raise BadInput(f"cannot listen on {place}: {exc.strerror or exc}") from exc
    except BaseException:
        made.close()
        raise
    return made


def _clear(path: str) -> None:
    """Remove a socket left by a killed server, if any. Raises BadInput if the path is in use."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise BadInput(f"{path}: {exc.strerror}") from exc
    if not stat.S_ISSOCK(found.st_mode):
        raise BadInput(f"{path} exists and is not a socket", hint="choose another path")
    with socket.socket(socket.AF_UNIX) as trial:
        trial.setblocking(False)  # a server that is too busy to accept also counts as running
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        except BlockingIOError as exc:
            raise _taken(path) from exc
        except OSError as exc:
            raise BadInput(f"{path}: {exc.strerror}") from exc
        else:
            raise _taken(path)


def _taken(path: str) -> BadInput:
    return BadInput(f"another server is listening on {path}", hint="choose another path")
