"""Runs on a host, sent there as text: samples a guest's memory, or tries a link.

    python3 - memory UUID NAME SIZE SAMPLES TIME,TIME,...
    python3 - listen ADDRESS TOKEN SECONDS
    python3 - send ADDRESS PORT TOKEN SECONDS

The answer is one line of JSON; a refusal is one line on stderr and exit code 1. Nothing but the
standard library, and nothing newer than Python 3.7: this is the host's Python, not ours.
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
# libvirt's range for migrations, which firewalls between hosts let through; from its upper end,
# since libvirt takes from the lower one.
PORTS = range(49215, 49151, -1)
_PRESENT, _SWAPPED = 1 << 63, 1 << 62
# Beyond what two mappings that the kernel joined may add to a guest's memory.
_SLACK = 64 << 20
_ZERO = bytes(PAGE)


class MeasureRefused(Exception):
    """It cannot be measured; the text says why."""


# --- memory ----------------------------------------------------------------------------------


def process_of(uuid: str, name: str) -> int:
    """The guest's QEMU process: the one that libvirt recorded, if its command line names the guest.

    No other is looked for: any user can start a process with that command line.
    """
    try:
        pid = int(Path(f"/run/libvirt/qemu/{name}.pid").read_text())
        words = command_of(pid).split("\0")
    except (OSError, ValueError):
        raise MeasureRefused("libvirt has recorded no QEMU process of it") from None
    if uuid not in words or "qemu" not in words[0]:
        raise MeasureRefused("the process that libvirt recorded is not its QEMU")
    return pid


def command_of(pid: int) -> str:
    """A process's command line, each word ended by a zero byte."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


def backends(command: str, size: int) -> list[int]:
    """Sizes of the memory backends on a QEMU command line; without any, the guest's memory."""
    found = [
        int(match)
        for word in command.split("\0")
        if "memory-backend-" in word
        for match in re.findall(r"\bsize\"?[=:]\s*(\d+)", word)
    ]
    return found or [size]


def mappings(maps: str, sizes: list[int]) -> list[tuple[int, int]]:
    """Where blocks of these sizes are mapped, as (begin, end), by the text of /proc/PID/maps."""
    free = []
    for line in maps.splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if match:
            free.append((int(match[1], 16), int(match[2], 16)))
    chosen = []
    for size in sorted(sizes, reverse=True):
        fitting = [one for one in free if size <= one[1] - one[0] <= size + _SLACK]
        if not fitting:
            raise MeasureRefused("its memory is not seen among its mappings")
        best = min(fitting, key=lambda one: one[1] - one[0])
        free.remove(best)
        chosen.append(best)
    return chosen


def places(regions: list[tuple[int, int]], samples: int) -> list[int]:
    """Addresses of pages: one drawn from each of `samples` equal shares of the regions.

    Memory is written in runs of neighbouring pages; one page of each share shows how much of it
    far better than as many pages from anywhere.
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
    """How often neighbours differ."""
    return sum(marks[i] != marks[i + 1] for i in range(len(marks) - 1))


class Sampler:
    """The chosen pages of one process, and what they held at first."""

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
        """A checksum; 0 for zeros, None for a page in swap, which is left there.

        A page that nobody touched is not read: reading would give it room in shared memory.
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
        """Time since the first look, pages that changed since, and flips among them."""
        begun = time.monotonic()
        for i, address in enumerate(self._at):
            if not self.changed[i] and self._look(address) != self.first[i]:
                self.changed[i] = True
        # Each page was looked at after about the same time, so far as both looks took as long.
        middle = begun - self.begun + (time.monotonic() - begun - self.took) / 2
        return middle, sum(self.changed), flips(self.changed)

    def resident(self) -> int:
        """Pages that have room, or are in swap."""
        found = 0
        for address in self._at:
            entry = os.pread(self._map, 8, address // self._host_page * 8)
            found += bool(int.from_bytes(entry, sys.byteorder) & (_PRESENT | _SWAPPED))
        return found


def memory(uuid: str, name: str, size: int, samples: int, times: list[float]) -> object:
    """Look at a sample of a guest's pages now, and again at each of the times."""
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
    """Wait for one sender in a process of its own, which ends by itself; tell the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    for port in PORTS:
        try:
            server.bind((address, port))
            server.listen(4)
            break
        except OSError:
            continue
    else:
        raise MeasureRefused("none of libvirt's ports for migrations is free")
    if os.fork():
        return {"port": server.getsockname()[1]}
    # Whatever happens to whom: this process and its port are gone after that.
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
    """Take what the one who knows the token sends, and tell it how much came when."""
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
    """Send zeros to a listener for that long; what it says came when."""
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
    """Do what the words say."""
    what, *rest = words
    if what == "memory":
        times = [float(one) for one in rest[4].split(",") if one]
        return memory(rest[0], rest[1], int(rest[2]), int(rest[3]), times)
    if what == "listen":
        return listen(rest[0], rest[1], float(rest[2]))
    if what == "send":
        return send(rest[0], int(rest[1]), rest[2], float(rest[3]))
    raise MeasureRefused(f"nobody knows how to {what}")


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(main(sys.argv[1:])) + "\n")
    except (MeasureRefused, OSError, ValueError) as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(1)
