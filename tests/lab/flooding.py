"""Runs beside the observer: asks a guest for answers as fast as it can, and counts none of them.

python -m tests.lab.flooding ADDRESS RATE SECONDS
"""

import socket
import sys
import time

from vmckpt.lab import wire

_PORT = 7001
_BURST = 0.005


def main() -> None:
    address, rate, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    ask = wire.encode(wire.Message(kind=wire.PING, token=1))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.connect((address, _PORT))
        began, sent = time.monotonic(), 0
        while (passed := time.monotonic() - began) < seconds:
            for _ in range(int(passed * rate) - sent):
                line.send(ask)
            sent = int(passed * rate)
            time.sleep(_BURST)


if __name__ == "__main__":
    main()
