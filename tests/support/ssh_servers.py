"""An ssh server that lets everybody in, and then behaves as a test wants."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import paramiko
import pytest

KEY = paramiko.ECDSAKey.generate()
Behave = Callable[[paramiko.Channel, bytes], None]


class Server(paramiko.ServerInterface):
    """Lets everybody in and then behaves as it was told to."""

    def __init__(self, behave: Behave, *, opens: bool, starts: bool) -> None:
        self._behave = behave
        self._opens = opens
        self._starts = starts

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return 0  # AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if not self._opens:
            time.sleep(1.0)
        return 0  # OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        if not self._starts:
            time.sleep(1.0)
        threading.Thread(target=self._serve, args=(channel, command), daemon=True).start()
        return True

    def _serve(self, channel: paramiko.Channel, command: bytes) -> None:
        time.sleep(0.02)  # the request is to be granted first
        with suppress(OSError, EOFError, paramiko.SSHException):
            self._behave(channel, command)


class Sshd:
    """Listens on a port of this machine until the test ends."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.behave: Behave = lambda channel, _command: channel.close()
        self.greet: Callable[[socket.socket], bool] = lambda _line: True
        self.opens = self.starts = True
        self._lines: list[socket.socket] = []
        self._transports: list[paramiko.Transport] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def logins(self) -> int:
        """Number of connections so far."""
        return len(self._lines)

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self.socket.accept()
            except OSError:
                return
            self._lines.append(line)
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):
            if self.greet(line):
                transport = paramiko.Transport(line)
                self._transports.append(transport)
                transport.add_server_key(KEY)
                server = Server(self.behave, opens=self.opens, starts=self.starts)
                transport.start_server(server=server)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        for one in (self.socket, *self._lines):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def sshd() -> Iterator[Sshd]:
    server = Sshd()
    yield server
    server.close()
