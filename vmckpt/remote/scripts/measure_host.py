"""Sample a guest's memory, or measure a link. This script is sent to a host as text.

    python3 - memory UUID NAME SIZE SAMPLES TIME,TIME,...
    python3 - listen ADDRESS TOKEN SECONDS
    python3 - send ADDRESS PORT TOKEN SECONDS

It prints one line of JSON; on failure, one line on stderr and exit code 1. It runs on the host's
Python, so it uses only the standard library and nothing newer than Python 3.7.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sys
import time
import zlib
from pathlib import Path

PAGE = 4096
# libvirt's migration range, which firewalls between hosts pass. libvirt uses the range from the
# lower end, so this script starts at the upper end.
PORTS = range(49215, 49151, -1)
_PRESENT, _SWAPPED = 1 << 63, 1 << 62
# How much larger a mapping may be than the guest's memory: the kernel may merge mappings.
_SLACK = 64 << 20
_ZERO = bytes(PAGE)


class MeasureRefused(Exception):
    """The measurement is not possible; the text is the reason."""


# --- memory ----------------------------------------------------------------------------------


def process_of(uuid: str, name: str) -> int:
    """Return the ID of the process that libvirt recorded as the guest's QEMU, if its arguments fit.

    Other processes are not considered: any user can start one with the same command line. Raises
    MeasureRefused.
    """
    try:
        pid = int(Path(f"/run/libvirt/qemu/{name}.pid").read_text())
        words = command_of(pid).split("\0")
    except (OSError, ValueError):
        raise MeasureRefused("libvirt has no record of the guest's QEMU process") from None
    if uuid not in words or "qemu" not in words[0]:
        raise MeasureRefused("the process that libvirt recorded is not the guest's QEMU")
    return pid


def command_of(pid: int) -> str:
    """Return a process's command line; each argument ends with a zero byte. Raises OSError."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


def backends(command: str, size: int) -> list[int]:
    """Return the sizes, in bytes, of the memory backends on a QEMU command line.

    `command`: the arguments, separated by zero bytes. If there is no backend, returns [size].
    """
    found = [
        int(match)
        for word in command.split("\0")
        if "memory-backend-" in word
        for match in re.findall(r"\bsize\"?[=:]\s*(\d+)", word)
    ]
    return found or [size]


def mappings(maps: str, sizes: list[int]) -> list[tuple[int, int]]:
    """Return the mappings, as (begin, end), of memory blocks with these sizes, the largest first.

    `maps`: the text of /proc/PID/maps. Raises MeasureRefused if a block has no mapping.
    """
    free = []
    for line in maps.splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if match:
            free.append((int(match[1], 16), int(match[2], 16)))
    chosen = []
    for size in sorted(sizes, reverse=True):
        fitting = [one for one in free if size <= one[1] - one[0] <= size + _SLACK]
        if not fitting:
            raise MeasureRefused("the guest's memory was not found among QEMU's mappings")
        best = min(fitting, key=lambda one: one[1] - one[0])
        free.remove(best)
        chosen.append(best)
    return chosen


def places(regions: list[tuple[int, int]], samples: int) -> list[int]:
    """Return page addresses: a random page from each of `samples` equal shares of the regions.

    Guests write runs of neighbouring pages, so such a stratified sample is much more precise than a
    simple random sample of the same size.
    """
    pages = sum(end - begin for begin, end in regions) // PAGE
    samples = min(samples, pages)
    found = []
    left, before = list(regions), 0
    for i in range(samples):
        page = random.randrange(i * pages // samples, (i + 1) * pages // samples)
        while page - before >= (left[0][1] - left[0][0]) // PAGE:
            before += (left[0][1] - left[0][0]) // PAGE
            del left[0]
        found.append(left[0][0] + (page - before) * PAGE)
    return found


def flips(marks: list[bool]) -> int:
    """Return the number of flips: neighbours of which exactly one is marked."""
    return sum(marks[i] != marks[i + 1] for i in range(len(marks) - 1))


class Sampler:
    """The sampled pages of one process, with checksums of their initial content."""

    def __init__(self, pid: int, at: list[int]) -> None:
        self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        self._map = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
        self._at = at
        self._host_page = os.sysconf("SC_PAGESIZE")
        self.begun = time.monotonic()
        self.first = [self._look(address) for address in at]
        self.took = time.monotonic() - self.begun
        self.changed = [False] * len(at)

    def _look(self, address: int) -> int | None:
        """Return a page's checksum; 0 for zeros, None for a page in swap, which is not read.

        A page that is not present counts as zeros and is not read: reading would allocate it in
        shared memory.
        """
        entry = os.pread(self._map, 8, address // self._host_page * 8)
        bits = int.from_bytes(entry, sys.byteorder)
        if bits & _SWAPPED:
            return None
        if not bits & _PRESENT:
            return 0
        page = os.pread(self._memory, PAGE, address)
        return 0 if page == _ZERO else zlib.crc32(page) | 1 << 32

    def again(self) -> tuple[float, int, int]:
        """Compare all pages with their initial content.

        Returns the time since the first pass in seconds, the number of pages changed since then,
        and the number of flips among all pages. Raises OSError.
        """
        begun = time.monotonic()
        for i, address in enumerate(self._at):
            if not self.changed[i] and self._look(address) != self.first[i]:
                self.changed[i] = True
        # Both passes read the pages in the same order and at about the same speed. So the time
        # between two reads of a page is about the same for all pages.
        middle = begun - self.begun + (time.monotonic() - begun - self.took) / 2
        return middle, sum(self.changed), flips(self.changed)

    def resident(self) -> int:
        """Return the number of sampled pages that are in memory or in swap. Raises OSError."""
        found = 0
        for address in self._at:
            entry = os.pread(self._map, 8, address // self._host_page * 8)
            found += bool(int.from_bytes(entry, sys.byteorder) & (_PRESENT | _SWAPPED))
        return found


def memory(uuid: str, name: str, size: int, samples: int, times: list[float]) -> object:
    """Sample a guest's pages now, and again at each of `times`, in seconds from now.

    Returns the answer that `measure.memory_seen` parses. Raises MeasureRefused, OSError.
    """
    pid = process_of(uuid, name)
    maps = Path(f"/proc/{pid}/maps").read_text()
    regions = mappings(maps, backends(command_of(pid), size))
    at = places(regions, samples)
    sampler = Sampler(pid, at)
    points = []
    for when in sorted(times):
        time.sleep(max(0.0, sampler.begun + when - time.monotonic()))
        points.append(sampler.again())
    used = [seen != 0 for seen in sampler.first]
    return {
        "size": sum(end - begin for begin, end in regions),
        "samples": len(at),
        "used": "".join("1" if one else "0" for one in used),
        "resident": sampler.resident(),
        "points": points,
        "cpu": time.process_time(),
    }


# --- link ------------------------------------------------------------------------------------


def listen(address: str, token: str, seconds: float) -> object:
    """Wait for a sender in a child process, which exits by itself. Returns the port.

    Raises MeasureRefused if it cannot listen at `address` on any port in the migration range.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    last: OSError | None = None
    for port in PORTS:
        try:
            server.bind((address, port))
            server.listen(4)
            break
        except OSError as exc:
            last = exc
    else:
        raise MeasureRefused(
            f"cannot listen at {address} on any port in libvirt's migration range: {last}"
        )
    if os.fork():
        return {"port": server.getsockname()[1]}
    # The child and its port must be gone after this time, whatever happens.
    signal.alarm(int(seconds) + 5)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    try:
        receive(server, token.encode(), seconds)
    finally:
        os._exit(0)


def receive(server: socket.socket, token: bytes, seconds: float) -> None:
    """Receive from the sender that knows the token, and reply with marks (seconds, bytes so far).

    `seconds`: how long to receive. Raises OSError.
    """
    buffer = bytearray(1 << 20)
    while True:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(seconds + 3)
            if peer.recv(len(token), socket.MSG_WAITALL) != token:
                continue
            got, begun = 0, 0.0
            marks: list[tuple[float, int]] = []
            while True:
                count = peer.recv_into(buffer)
                if not count:
                    break
                now = time.monotonic()
                begun = begun or now
                got += count
                if not marks or now - begun - marks[-1][0] >= 0.01:
                    marks.append((now - begun, got))
            marks.append((time.monotonic() - begun, got))
            peer.sendall(json.dumps(marks).encode())
            return


def send(address: str, port: int, token: str, seconds: float) -> object:
    """Send zeros to a listener for `seconds`. Returns the marks. Raises OSError, ValueError."""
    block = memoryview(bytes(1 << 20))
    with socket.create_connection((address, port), timeout=3) as peer:
        peer.settimeout(seconds + 3)
        peer.sendall(token.encode())
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            peer.send(block)
        peer.shutdown(socket.SHUT_WR)
        said = b""
        more = peer.recv(1 << 16)
        while more:
            said += more
            more = peer.recv(1 << 16)
    return {"marks": json.loads(said)}


def main(words: list[str]) -> object:
    """Run a subcommand and return its answer. Raises MeasureRefused, OSError, ValueError."""
    what, *rest = words
    if what == "memory":
        times = [float(one) for one in rest[4].split(",") if one]
        return memory(rest[0], rest[1], int(rest[2]), int(rest[3]), times)
    if what == "listen":
        return listen(rest[0], rest[1], float(rest[2]))
    if what == "send":
        return send(rest[0], int(rest[1]), rest[2], float(rest[3]))
    raise MeasureRefused(f"unknown command {what}")


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(main(sys.argv[1:])) + "\n")
    except (MeasureRefused, OSError, ValueError) as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(1)
