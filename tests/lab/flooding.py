"""Runs beside the observer: asks a guest for answers as fast as it can, and reads none of them.

The guest's kernel answers an echo request where it receives it. Its prover, which is a process, is
not asked: where it has no core for itself it is given less of one the more its kernel receives.

    python -m tests.lab.flooding ADDRESS RATE SECONDS
"""

import socket
import struct
import sys
import time

_ECHO_REQUEST = 8
_BURST = 0.005


def echo_request() -> bytes:
    """An ICMP message without content; its checksum is the complement of its only other word."""
    return struct.pack("!BBHHH", _ECHO_REQUEST, 0, 0xFFFF - (_ECHO_REQUEST << 8), 0, 0)


def main() -> None:
    address, rate, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    ask = echo_request()
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as line:
        # Nobody reads what comes.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        line.connect((address, 0))
        began, sent = time.monotonic(), 0
        while (passed := time.monotonic() - began) < seconds:
            for _ in range(int(passed * rate) - sent):
                line.send(ask)
            sent = int(passed * rate)
            time.sleep(_BURST)


if __name__ == "__main__":
    main()
