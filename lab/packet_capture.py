"""What goes over a host's cable, searched for a pattern: is a stream really encrypted?"""

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
# libvirt's default range for migrations, disks included; its own daemons talk below it.
FIRST_PORT, LAST_PORT = 49152, 49215


@dataclass(slots=True)
class Heard:
    """What was seen on the migration ports."""

    bytes: int = 0
    hits: int = 0
    """Packets that hold the pattern."""
    lost: int = 0
    """Packets that came too fast to be looked at."""


class Capture:
    """Searches every packet on a host's cable, while it is open, for the pattern.

    A pattern that lies across two packets is not found: use one that comes often.
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
        # SOL_PACKET, PACKET_STATISTICS: two counters, the second is of packets that were dropped.
        self.heard.lost = struct.unpack("II", self._socket.getsockopt(263, 6, 8))[1]
        self._socket.close()

    def _listen(self) -> None:
        """Until it is closed, and then until nothing waits any more."""
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
    """The data of an Ethernet frame that is TCP over IPv4 to or from a migration port."""
    if len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return None
    tcp = 14 + (frame[14] & 15) * 4
    source, target = struct.unpack_from(">HH", frame, tcp)
    if not any(FIRST_PORT <= port <= LAST_PORT for port in (source, target)):
        return None
    return frame[tcp + (frame[tcp + 12] >> 4) * 4 :]
