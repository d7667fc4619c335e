"""Both ends of a plain TCP connection between two lab hosts; see limits.link.

python -m bench.plain_socket receive ADDRESS
python -m bench.plain_socket send ADDRESS MIB       prints bytes per second, and the round trip
"""

import socket
import statistics
import sys
import time

_PORT, _MIB = 41000, 1 << 20
_PATIENCE = 30.0


def receive(address: str) -> None:
    """Echo single bytes until an empty line, then read until the end and acknowledge."""
    with socket.create_server((address, _PORT)) as server:
        line, _ = server.accept()
        with line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (byte := line.recv(1)) != b"\n":
                line.sendall(byte)
            while line.recv(_MIB):
                pass
            line.sendall(b".")


def _connected(address: str) -> socket.socket:
    """Connect to `receive`, which may have just been started."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_connection((address, _PORT))
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)


def send(address: str, mib: int) -> None:
    """Print the bandwidth and the round trip to `receive`."""
    with _connected(address) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(200):
            began = time.perf_counter()
            line.sendall(b"x")
            line.recv(1)
            trips.append(time.perf_counter() - began)
        line.sendall(b"\n")
        data, began = bytes(_MIB), time.perf_counter()
        for _ in range(mib):
            line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        line.recv(1)
        took = time.perf_counter() - began
    print(mib * _MIB / took, statistics.median(trips))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]))
