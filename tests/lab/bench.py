"""What the lab tests use: a lab, hands to use it with, and vmckpt run as a person would."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, AnyStr, TypeVar

from tests.support import schemas
from tests.support.following import take
from vmckpt import inventory
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.inventory import Inventory
from vmckpt.units import parse_rate
from vmckpt_lab import guests, host, ledger
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.observer import client
from vmckpt_lab.observer.analysis import View
from vmckpt_lab.plan import LabPlan

T = TypeVar("T")
VMCKPT = [sys.executable, "-m", "vmckpt.cli.app"]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Bench:
    """A lab and hands to use it with."""

    plan: LabPlan

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "VMCKPT_INVENTORY": str(self.plan.inventory),
            "PYTHONFAULTHANDLER": "1",
            "VMCKPT_STATE": str(self.plan.folder / "state"),
        }

    @property
    def inventory(self) -> Inventory:
        return inventory.load(self.plan.inventory)

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start a vmckpt command."""
        return subprocess.Popen(
            [*VMCKPT, *args], env=self.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *args: str) -> Done:
        """Run a vmckpt command to its end."""
        return finish(self.start(*args))

    def good(self, *args: str) -> Done:
        """Run a command that must end well."""
        done = self.run(*args)
        assert done.code == 0, done.err
        return done

    def guest(self, name: str = "web1", on: str = "alpha", **wishes: Any) -> guests.LabGuest:
        return guests.start(self.plan, name, on, **wishes)

    def inside(self, name: str, *args: str) -> str:
        """Run a command inside a host that must end well; what it printed."""
        entered = host.enter(self.plan.host(name), *args)
        return subprocess.run(entered, check=True, capture_output=True, text=True).stdout

    def follow(self, message: str, *more: str, only: str = "", at: str = "alpha",
               **values: str) -> str:  # fmt: skip
        """Run the commands of the hint in a message; returns what they printed.

        Each is run on the host that the hint names, or else `at`. `more`: further words for
        vmckpt's commands, such as --yes. `only`: of several commands, those with this text.
        """
        found = take(message, **values)
        printed = ""
        for number, one in enumerate(found):
            if only not in str(one):
                continue
            names = {each.name for each in self.plan.hosts}
            on = next((each.host for each in found[number:] if each.host in names), at)
            if one.words[0] == "vmckpt":
                done = self.good(*one.words[1:], *more)
                printed += done.out + done.err
            else:
                printed += self.inside(on or at, *one.words)
        return printed

    def where(self, name: str = "web1") -> list[str]:
        return asyncio.run(guests.whereabouts(self.plan, name))

    def seen(self, name: str = "web1", **window: float) -> View:
        return client.status(self.plan.observer_socket, name, **window)

    def ledgers(self, name: str = "web1") -> dict[str, bool]:
        found = ledger.audit(self.plan, name).entries
        for one in found:
            if not one.whole:
                sys.stderr.write(f"{name}: {one.name}: {one.text}\n")
        return {one.name: one.whole for one in found}

    def ask(self, name: str, question: Callable[[Hypervisor], Awaitable[T]]) -> T:
        """One question to a host's libvirt."""

        async def asked() -> T:
            async with Hypervisor(self.inventory.host(name)) as hypervisor:
                return await question(hypervisor)

        return asyncio.run(asked())


def uuid(bench: Bench, on: str = "alpha") -> str:
    """Of web1, as its host's libvirt says."""
    guest = bench.ask(on, lambda hypervisor: find_guest(hypervisor, "web1"))
    assert guest is not None
    return guest.uuid


# Rewrites its region faster than the link carries: pre-copy never ends.
BUSY = {"memory": "192MiB", "dirty": "64MiB@90MiB/s"}
SLOW = parse_rate("200mbit")


def migrate(bench: Bench, to: str = "beta", *more: str) -> Done:
    return bench.run("migrate", "web1", "--to", to, "--json", *more)


def codes(done: Done) -> list[str]:
    return [f["code"] for f in done.json["findings"] if f["severity"] == "blocker"]


WHOLE = {"memory": True, "disk": True, "output": True}


def gathered(process: subprocess.Popen[AnyStr], *, limit: float = 120.0) -> tuple[AnyStr, AnyStr]:
    """Wait until a process has ended. Returns what it wrote, which must be for pipes."""
    deadline = Deadline(limit)
    while True:
        try:
            return process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired:
            if deadline.passed():
                process.send_signal(signal.SIGABRT)  # so that every thread says where it is
                said = _last_words(process)
                raise AssertionError(f"no end in {limit:g} s; it said:\n{said}") from None


def _last_words(process: subprocess.Popen[AnyStr]) -> str:
    """What an aborted process wrote; what it has started may keep its pipes open for ever."""
    try:
        said = process.communicate(timeout=10.0)
    except subprocess.TimeoutExpired as exc:
        process.kill()
        return repr(exc.stderr or exc.stdout)[-20000:]
    return repr(said[1] or said[0])[-20000:]


def finish(process: subprocess.Popen[str], *, limit: float = 300.0) -> Done:
    """Wait for a command.

    `limit` finds one that hangs; what a command may take is measured where that matters. Four
    evacuations in one command took more than two minutes beside two other labs.
    """
    out, err = gathered(process, limit=limit)
    words = list(process.args) if isinstance(process.args, list) else []
    schemas.held_text([str(one) for one in words[len(VMCKPT) :]], out)
    return Done(process.returncode, out, err)


def code_of(process: subprocess.Popen[str], *, limit: float = 60.0) -> int:
    """Wait until a process has ended that writes little. Returns its exit code."""
    until(lambda: process.poll() is not None, limit=limit)
    return int(process.returncode)


def until(condition: Callable[[], bool], *, limit: float = 30.0) -> None:
    """Wait for a condition; a test that waits in vain fails.

    It is looked at half of the time at most: a look may be a command, and what is waited for needs
    the cores, too.
    """
    give_up = Deadline(limit)
    while True:
        began = time.monotonic()
        if condition():
            return
        assert not give_up.passed(), f"waited in vain; the machine meanwhile:\n{_busiest()}"
        time.sleep(max(0.02, time.monotonic() - began))


def _busiest() -> str:
    """The processes that use the most of this machine now: a wait in vain may be their fault."""
    shown = subprocess.run(
        ("top", "-b", "-n", "2", "-d", "1", "-w", "160", "-c", "-o", "%CPU"),
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    second = shown[shown.rfind("top - ") :]
    return "\n".join(second.splitlines()[:20])


def answers(bench: Bench, name: str = "web1", *, limit: float = 60.0) -> None:
    """Wait until a guest has answered what it was asked from now on, and told new numbers."""
    began, heard = time.monotonic(), bench.seen(name).heard

    def again() -> bool:
        seen = bench.seen(name)
        return (seen.answered_at or 0.0) > began and seen.heard > heard + 5

    until(again, limit=limit)


def usable(bench: Bench) -> None:
    """Others can save, restore and migrate it, and it has lost nothing."""
    bench.inside("alpha", "virsh", "save", "web1", "/var/tmp/web1.saved")
    bench.inside("alpha", "virsh", "restore", "/var/tmp/web1.saved", "--running")
    bench.inside("alpha", "rm", "/var/tmp/web1.saved")
    bench.good("migrate", "web1", "--to", "beta")
    bench.good("migrate", "web1", "--to", "alpha")
    assert bench.ledgers() == WHOLE


def first_line(process: subprocess.Popen[str], word: str, *, limit: float = 120.0) -> list[str]:
    """Read a command's progress until a line has that word. Returns all lines that were read.

    A command that goes on and never says it is ended, so that the test fails and does not hang.
    """
    assert process.stderr is not None
    lines: list[str] = []
    with ended_late(process, limit):
        for line in process.stderr:
            lines.append(line)
            if word in line:
                return lines
    raise AssertionError(f"it ended before it said {word!r}:\n{''.join(lines)[-20000:]}")


@contextmanager
def ended_late(process: subprocess.Popen[str], limit: float) -> Iterator[None]:
    """Abort a process that is still waited for once the limit has passed."""
    over, deadline = threading.Event(), Deadline(limit)

    def watch() -> None:
        while not over.wait(0.5):
            if deadline.passed():
                process.send_signal(signal.SIGABRT)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


class Told:
    """What a service says, object by object."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.all: list[dict[str, Any]] = []

    def until(self, event: str, times: int = 1, limit: float = 180.0) -> None:
        """Read on until it has said that so many times in all."""
        end = Deadline(limit)
        while sum(one["event"] == event for one in self.all) < times:
            self.next(limit)
            assert not end.passed(), f"no {event}: {self.all}"

    def next(self, limit: float = 180.0) -> dict[str, Any]:
        """Wait for the next object, and return it."""
        assert self.process.stdout is not None
        with ended_late(self.process, limit):
            line = self.process.stdout.readline()
        assert line, f"it ended and had said {self.all}; {self.process.communicate()[1]}"
        self.all.append(json.loads(line))
        return self.all[-1]


def traces(prefix: str) -> list[str]:
    """What a lab whose names begin so has on this machine: processes, namespaces, links, files."""
    found = [f"netns {p}" for p in Path("/run/netns").glob(f"vmckpt.{prefix}*")]
    found += [f"file {p}" for p in Path("/var/lib/vmckpt/labs").glob(f"*{prefix}*")]
    found += [f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines()
              if f"vmckpt/labs/{prefix}" in line]  # fmt: skip
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"vmckpt/labs/{prefix}" in words or f"vmckpt.{prefix}" in words:
            found.append(f"process {words[:100]}")
    return found
