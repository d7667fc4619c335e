"""The observer: a process outside all hosts that probes every guest many times per second.

The process runs in the lab's observer namespace. `observer.client` starts it and queries it over a
unix socket, with one JSON object in each direction. The kernel records the arrival times, so a
delay in this loop does not lengthen a guest's silence. Delays are kept as the observer's own gaps.
"""

import json
import os
import select
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vmckpt_lab.observer import messages
from vmckpt_lab.observer.analysis import Rhythm, Sightings
from vmckpt_lab.pace import PROBE_INTERVAL
from vmckpt_lab.plan import GUEST_PORT, OBSERVER_PORT

_SO_TIMESTAMPNS = 35
_ASK_AGAIN = 0.2


class Observer:
    """The observer's sockets and event loop. `Sightings` evaluates what it receives."""

    def __init__(self, address: str, control: Path) -> None:
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._udp.bind((address, OBSERVER_PORT))
        self._udp.setblocking(False)
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        control.unlink(missing_ok=True)
        self._control.bind(str(control))
        self._control.listen(16)
        self._own = Rhythm()
        self._guests: dict[str, tuple[str, Sightings]] = {}
        self._verifying: dict[str, tuple[int, float]] = {}
        self._token = 0

    def run(self) -> None:
        """Probe guests and answer questions until killed."""
        poll = select.poll()
        poll.register(self._udp, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        due = time.monotonic()
        while True:
            wait = 1000 * max(0.0, due - time.monotonic()) if self._guests else None
            for descriptor, _ in poll.poll(wait):
                if descriptor == self._control.fileno():
                    self._serve()
                else:
                    self._receive()
            if (now := time.monotonic()) >= due:
                self._probe(now)
                due = max(due + PROBE_INTERVAL, now)

    def _probe(self, now: float) -> None:
        self._own.beat(now)
        self._token += 1
        ping = messages.encode(messages.Message(kind=messages.PING, token=self._token))
        for name, (address, sightings) in self._guests.items():
            sightings.ask(self._token)
            self._send(ping, address)
            token, asked = self._verifying.get(name, (0, 0.0))
            if token and now - asked > _ASK_AGAIN:
                self._verifying[name] = (token, now)
                sightings.ask(token)
                self._send(
                    messages.encode(messages.Message(kind=messages.VERIFY, token=token)), address
                )

    def _send(self, datagram: bytes, address: str) -> None:
        with suppress(OSError):  # without a route or neighbour, the guest's silence is recorded
            self._udp.sendto(datagram, (address, GUEST_PORT))

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            while True:
                data, extra, _, (address, _port) = self._udp.recvmsg(256, 64)
                at = time.monotonic()
                for _level, kind, value in extra:
                    if kind == _SO_TIMESTAMPNS:
                        seconds, nanoseconds = struct.unpack("qq", value)
                        at -= max(0.0, time.time() - (seconds + nanoseconds / 1e9))
                message = messages.decode(data)
                if message is not None:
                    self._hear(address, message, at)

    def _hear(self, address: str, message: messages.Message, at: float) -> None:
        for name, (its_address, sightings) in self._guests.items():
            if its_address == address:
                sightings.hear(message, at)
                if message.kind == messages.VERIFIED:
                    self._verifying.pop(name, None)

    def _serve(self) -> None:
        connection, _ = self._control.accept()
        with connection:
            connection.settimeout(1.0)
            with suppress(OSError, ValueError):
                question = json.loads(connection.makefile().readline())
                connection.sendall(json.dumps(self._answer(question)).encode() + b"\n")

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        operation, name = question.get("op"), str(question.get("guest", ""))
        if operation == "watch":
            self._guests[name] = (str(question["address"]), Sightings())
        elif operation == "forget":
            self._guests.pop(name, None)
        elif operation == "guests":
            return {"guests": sorted(self._guests)}
        elif name not in self._guests:
            return {"error": f"the observer does not watch guest {name!r}"}
        elif operation == "verify":
            self._token += 1
            self._verifying[name] = (self._token, 0.0)
            return {"token": self._token}
        else:
            now = time.monotonic()
            since, until = float(question.get("since", 0.0)), float(question.get("until", now))
            sightings = self._guests[name][1]
            return asdict(sightings.view(self._own, now=now, since=since, until=until))
        return {}


def main() -> None:
    """Run the observer. Arguments: its address on the guests' network, and the control socket."""
    address, control = sys.argv[1:]
    with suppress(OSError):  # real-time scheduling, where the kernel permits it
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    Observer(address, Path(control)).run()


if __name__ == "__main__":
    main()
