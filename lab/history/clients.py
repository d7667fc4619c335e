"""Run clients that use a lab guest's key-value store from outside, and record the answers.

This process runs in the lab's observer namespace; `recorder` starts it and stops it with SIGTERM.
All times are from the same clock. A call is recorded before its request is sent, and a return after
its answer is received: a delay in this loop only makes operations longer, so a linearizable history
stays linearizable. Every call is in the file even if this process is killed.
"""

import argparse
import random
import select
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from vmckpt_lab.history.history import call_line, return_line
from vmckpt_lab.history.workload import Client
from vmckpt_lab.observer import messages
from vmckpt_lab.plan import STORE_PORT

_DRAINS = 1.0
"""Seconds to wait for the last answers after SIGTERM."""
_SOON = 0.2
"""Maximum delay until a signal is handled, in seconds."""


class Clients:
    """The socket and the event loop of all clients. `Client` chooses the operations."""

    def __init__(self, store: tuple[str, int], file: TextIO, clients: list[Client]) -> None:
        self._store, self._file = store, file
        self._clients = {one.number: one for one in clients}
        self._recording = time.monotonic_ns()
        self._heard: dict[tuple[int, int], tuple[int, int]] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._ends: float | None = None

    def stop(self) -> None:
        """Begin no more operations; `run` returns once all are answered, or after `_DRAINS`."""
        self._ends = time.monotonic() + _DRAINS

    def run(self) -> None:
        """Send requests and receive answers until stopped."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        with self._socket:
            while not self._over():
                wakes = min(one.wakes for one in self._clients.values())
                poll.poll(min(max(0.0, wakes - time.monotonic()), _SOON) * 1000)
                self._receive()
                for one in self._clients.values():
                    self._send(one)
                self._file.flush()

    def _over(self) -> bool:
        if self._ends is None:
            return False
        waiting = any(one.waits for one in self._clients.values())
        return not waiting or time.monotonic() > self._ends

    def _send(self, client: Client) -> None:
        now = time.monotonic()
        ask = client.due(now, begin=self._ends is None)
        if ask is None:
            return
        if not ask.again:
            self._file.write(call_line(client.number, ask.sequence, ask.asked, now))
            self._file.flush()
        request = messages.Request(
            recording=self._recording, session=client.number, sequence=ask.sequence,
            asked=ask.asked,
        )  # fmt: skip
        with suppress(OSError):  # without a route or neighbour the request stays unanswered
            self._socket.sendto(messages.encode_request(request), self._store)

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            while True:
                try:
                    reply = messages.decode_reply(self._socket.recv(256))
                except ConnectionError:  # an ICMP message: the port is closed
                    continue
                if reply is not None and reply.recording == self._recording:
                    self._hear(reply, time.monotonic())

    def _hear(self, reply: messages.Reply, now: float) -> None:
        name, answer = (reply.session, reply.sequence), (reply.run, reply.before)
        if self._heard.get(name) != answer:
            line = return_line(*name, now, output=reply.before, run=reply.run)
            self._file.write(line)
            self._heard[name] = answer
        if reply.session in self._clients:
            self._clients[reply.session].hear(reply.sequence, reply.before, now)


def main() -> None:
    """Run clients of a store until SIGTERM, and write the history to a file."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("address")
    words.add_argument("file", type=Path)
    words.add_argument("--port", type=int, default=STORE_PORT)
    words.add_argument("--clients", type=int, default=8)
    words.add_argument("--keys", type=int, default=4)
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    if not (0 < given.clients <= messages.SESSIONS and 0 < given.keys <= messages.CELLS):
        words.error(f"use 1 to {messages.SESSIONS} clients and 1 to {messages.CELLS} keys")
    seen: dict[int, int] = {}
    clients = [
        Client(number, given.keys, random.Random(f"{given.seed} {number}"), seen)
        for number in range(given.clients)
    ]
    with given.file.open("w") as file:
        made = Clients((given.address, given.port), file, clients)
        signal.signal(signal.SIGTERM, lambda *_: made.stop())
        made.run()


if __name__ == "__main__":
    main()
