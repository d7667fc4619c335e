"""Search the packets on a host's link for a pattern, to check that a stream is encrypted."""

import socket
import struct
import threading
from dataclasses import dataclass
from types import TracebackType

from vmckpt_lab.plan import LabPlan

_EVERY_PROTOCOL = 0x0003
_SO_RCVBUFFORCE = 33
_BUFFER = 128 << 20
_PACKET = 1 << 17
# libvirt's default ports for migrations, including disks. Its daemons use ports below this range.
FIRST_PORT, LAST_PORT = 49152, 49215


@dataclass(slots=True)
class Heard:
    """Totals for the migration ports."""

    bytes: int = 0
    hits: int = 0
    """Number of packets that contain the pattern."""
    lost: int = 0
    """Number of packets that arrived too fast to be searched."""


class Capture:
    """Searches every packet on a host's link for a pattern. Use as a context manager.

    A pattern that spans two packets is not found, so use a pattern that occurs often.
    """

    def __init__(self, plan: LabPlan, host: str, pattern: bytes) -> None:
        self._link = plan.host(host).link
        self._pattern = pattern
        self.heard = Heard()

    def __enter__(self) -> "Capture":
        self._socket = socket.socket(
            socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL)
        )
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        self._socket.bind((self._link, 0))
        self._socket.settimeout(0.1)
        self._open = True
        self._thread = threading.Thread(target=self._listen, name="capture", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        self._thread.join()
        # SOL_PACKET, PACKET_STATISTICS: two counters, of which the second counts dropped packets.
        self.heard.lost = struct.unpack("II", self._socket.getsockopt(263, 6, 8))[1]
        self._socket.close()

    def _listen(self) -> None:
        """Search packets until the capture is closed and its queue is empty."""
        packet = bytearray(_PACKET)
        while True:
            try:
                size = self._socket.recv_into(packet)
            except TimeoutError:
                if not self._open:
                    return
                continue
            found = bytes(packet[:size])
            if (body := migration_payload(found)) is not None:
                self.heard.bytes += len(body)
                self.heard.hits += self._pattern in body


def migration_payload(frame: bytes) -> bytes | None:
    """Return the TCP payload of a frame to or from a migration port; None for other frames."""
    if len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return None
    tcp = 14 + (frame[14] & 15) * 4
    source, target = struct.unpack_from(">HH", frame, tcp)
    if not any(FIRST_PORT <= port <= LAST_PORT for port in (source, target)):
        return None
    return frame[tcp + (frame[tcp + 12] >> 4) * 4 :]
