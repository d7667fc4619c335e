"""Give another process a file descriptor, by system calls in that process.

pidfd_getfd(2) only takes descriptors from a process. So the process is made to connect to an
abstract Unix socket of the caller, and to receive the descriptor from there (SCM_RIGHTS).
"""

import errno
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from vmckpt.hypervisor.qemu_process.injection import Stopped
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

_CLOSE_ON_EXEC = 0x40000000  # MSG_CMSG_CLOEXEC
_HEADER = struct.Struct("=QII")  # of a control message: length, level, type
_CREDENTIALS = struct.Struct("=III")  # process, user, group
_BACKLOG = 64
_BYTE, _CONTROL, _MESSAGE = 256, 320, 384
"""Offsets in the scratch memory: the byte of data and its vector, the control message, and the
message's description."""
_VECTOR = _BYTE + 16


class Handover:
    """A listening socket from which one process receives one descriptor."""

    def __init__(self, process: HeldProcess, descriptor: int) -> None:
        self._process, self._descriptor = process, descriptor
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._name = b"\0vmckpt-" + secrets.token_hex(16).encode()
        self._listener.bind(self._name)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)

    def close(self) -> None:
        self._listener.close()

    def receive(self, stopped: Stopped) -> int:
        """Let the stopped process receive the descriptor. Returns its number in that process.

        Raises OSError, for example if a security module does not permit the connection, and
        CannotInject.
        """
        line = stopped.syscall("socket", socket.AF_UNIX, socket.SOCK_STREAM | os.O_CLOEXEC, 0)
        try:
            address = struct.pack("=H", socket.AF_UNIX) + self._name
            stopped.write(address)
            stopped.syscall("connect", line, stopped.scratch, len(address))
            self._send()
            return self._received(stopped, line)
        finally:
            stopped.syscall("close", line)

    def _send(self) -> None:
        """Send the descriptor to the process, but to no other peer. Raises OSError."""
        while True:
            line, _ = self._listener.accept()
            with line:
                raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(raw)[0] == self._process.pid:
                    socket.send_fds(line, [b"\0"], [self._descriptor])
                    return

    def _received(self, stopped: Stopped, line: int) -> int:
        at = stopped.scratch
        control = _HEADER.size + 8
        memory = bytearray(_MESSAGE + 56)
        struct.pack_into("=QQ", memory, _VECTOR, at + _BYTE, 1)
        struct.pack_into(
            "=QQQQQQQ", memory, _MESSAGE, 0, 0, at + _VECTOR, 1, at + _CONTROL, control, 0
        )
        stopped.write(bytes(memory))
        stopped.syscall("recvmsg", line, at + _MESSAGE, _CLOSE_ON_EXEC)
        told = stopped.read(control, _CONTROL)
        _, level, kind = _HEADER.unpack_from(told)
        if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            raise OSError(errno.EPROTO, "QEMU received no descriptor")
        return int(struct.unpack_from("=i", told, _HEADER.size)[0])


@contextmanager
def offered(process: HeldProcess, descriptor: int) -> Iterator[Handover]:
    """Offer a descriptor to a process until the block ends. Raises OSError."""
    handover = Handover(process, descriptor)
    try:
        yield handover
    finally:
        handover.close()
