"""What the lab tests of protections share: a guest, its protection, and what both agents say."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.lab.bench import Bench, traces, until
from vmckpt.errors import RemoteError
from vmckpt.replication import control_socket
from vmckpt.replication.watchdog import process as watchdog
from vmckpt_lab import guests, host, lab, network

# As virt-install would define it: its memory cannot be mapped.
GUEST: dict[str, Any] = {"memory": "160MiB", "dirty": "32MiB@10MiB/s", "disk": "32MiB"}
PREPARED: dict[str, Any] = {**GUEST, "shared_memory": True}
LEFT = "/run/vmckpt/replication"
OURS = f"nbdkit|{watchdog.__name__}|vmckpt.agent.replication"
"""In the command lines of a protection's processes."""
SOON = 40.0
TTL = 10.0
"""Seconds of a lease. An agent that gets no core for four fifths of it costs its guest, so that on
a busy machine a shorter one would run out for no reason."""


@contextmanager
def lab_with_witness(name: str, *, qemu_user: str = "root") -> Iterator[Bench]:
    """A lab with a witness, of which nothing is left in the end."""
    plan = lab.up(name, hosts=2, with_witness=True, qemu_user=qemu_user)
    try:
        yield Bench(plan)
    finally:
        lab.down(name)
    assert traces(f"{name}/") + traces(f"{name}.") == []


@contextmanager
def tidied(bench: Bench) -> Iterator[Bench]:
    """For one test: afterwards its hosts are healed, and its guests and protections gone."""
    yield bench
    say_logs(bench)
    bench.run("unprotect", "web1")
    for one in bench.plan.hosts:
        lab.heal(bench.plan, one.name)
    until(lambda: unprotected(bench), limit=4 * SOON)
    for guest in guests.stored(bench.plan):
        guests.remove(bench.plan, guest.name)


def unprotected(bench: Bench) -> bool:
    """Recover, and whether no protection is left: a busy host may have refused `unprotect`."""
    bench.run("recover")
    left = [str(one["job"]) for one in bench.good("status", "--json").json]
    for one in left:
        sys.stderr.write(bench.run("unprotect", one).err)
    return left == []


def say_logs(bench: Bench) -> None:
    """The logs of agents and watchdogs, to explain a test that failed."""
    for one in bench.plan.hosts:
        if host.is_up(one):
            said = bench.inside(
                one.name, "sh", "-c", f"tail -n 15 {LEFT}/*/*.log {LEFT}/*/killed 2>/dev/null || :"
            )
            sys.stderr.write(f"{one.name}:\n{said}\n")


def protect(bench: Bench, *more: str, automatic: bool = True) -> dict[str, Any]:
    words = standby("automatic" if automatic else "manual")
    return dict(bench.good("protect", "web1", *words, "--json", *more).json)


def standby(failover: str) -> tuple[str, ...]:
    """Options of `protect`: where the standby is, and when it takes over."""
    return ("--to", "beta", "--interval", "200ms", "--failover", failover, "--ttl", f"{TTL:g}s")


def entry(bench: Bench) -> dict[str, Any]:
    """All that is told of the guest's protection."""
    (one,) = bench.good("status", "web1", "--json").json
    return dict(one)


def answered(bench: Bench, *names: str) -> dict[str, Any]:
    """The same, once these hosts have answered: a busy one may not do so in time."""
    found: dict[str, Any] = {}

    def told() -> bool:
        found.clear()
        found.update(entry(bench))
        return all("error" not in found["says"].get(name, {}) for name in names)

    until(told, limit=SOON)
    return found


def ours(bench: Bench) -> dict[str, Any]:
    return dict(answered(bench, "alpha")["says"]["alpha"])


def theirs(bench: Bench) -> dict[str, Any]:
    return dict(answered(bench, "beta")["says"]["beta"])


def asked(bench: Bench, name: str = "alpha") -> dict[str, Any]:
    """What the agent of a host says, asked without a vmckpt command; nothing if there is none."""
    first = host.first_process(bench.plan.host(name))
    for folder in Path(f"/proc/{first}/root{LEFT}").glob("*"):
        with suppress(RemoteError):
            return control_socket.ask(folder, {})
    return {}


def epochs(bench: Bench, count: int = 3) -> None:
    """Wait until the backup has committed so many more epochs, and the guest has told more."""
    before, heard = asked(bench, "beta").get("committed") or 0, bench.seen().heard
    until(lambda: (asked(bench, "beta").get("committed") or 0) >= before + count, limit=SOON)
    until(lambda: bench.seen().heard > heard, limit=SOON)


def left(bench: Bench) -> list[str]:
    """What of a protection is on both hosts."""
    found = []
    for name in ("alpha", "beta"):
        listed = bench.inside(
            name,
            "sh",
            "-c",
            f"ls {LEFT} 2>/dev/null; pgrep -fa '{OURS}' || true",
        )
        found += [f"{name}: {line}" for line in listed.splitlines() if "pgrep" not in line]
    return found


def on_qemu(bench: Bench, name: str) -> list[str]:
    """Filters and block jobs that a guest's QEMU has, and what is left of its capabilities."""

    def qmp(command: str, **arguments: object) -> Any:
        text = json.dumps({"execute": command, "arguments": arguments})
        told = bench.inside(name, "virsh", "qemu-monitor-command", "web1", text)
        return json.loads(told)["return"]

    found = [one["name"] for one in qmp("qom-list", path="/objects") if "vmckpt" in one["name"]]
    found += [one["label"] for one in qmp("query-chardev") if "vmckpt" in one["label"]]
    found += [one["device"] for one in qmp("query-block-jobs")]
    on = {one["capability"] for one in qmp("query-migrate-capabilities") if one["state"]}
    return found + sorted(on - {"events"}) + ([] if "events" in on else ["no events"])


def stored(bench: Bench, name: str) -> list[str]:
    """Guests that a host has a definition of."""
    return bench.inside(name, "virsh", "list", "--all", "--persistent", "--name").split()


def agent(bench: Bench, name: str) -> int:
    """The agent's process, as seen from outside of the lab host."""
    found: list[int] = []

    def one() -> bool:
        """For a moment a program that it starts has its command line, as has what starts it."""
        all_ = processes(bench, name, b"vmckpt.agent.replication.main")
        found[:] = [process for process in all_ if _parent(process) not in (None, *all_)]
        return len(found) == 1

    until(one, limit=SOON)
    return found[0]


def _parent(process: int) -> int | None:
    """None: it is gone."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def processes(bench: Bench, name: str, word: bytes) -> list[int]:
    """Those of a host with that word in their command line, as seen from outside."""
    found = []
    for one in network.processes_in(bench.plan.host(name).namespace):
        with suppress(OSError):
            words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
            if any(word in each for each in words):
                found.append(one)
    return found


def signalled(bench: Bench, name: str, word: bytes, number: signal.Signals) -> None:
    """Send a signal to all of those."""
    for one in processes(bench, name, word):
        with suppress(ProcessLookupError):
            os.kill(one, number)


@contextmanager
def imitation(bench: Bench, name: str, uuid: str) -> Iterator[None]:
    """A process of an ordinary user on a host with the command line of the guest's QEMU."""
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
    command = [*words, "-c", "import time; time.sleep(600)", "-uuid", uuid, "-name", "guest=web1"]
    with subprocess.Popen(host.enter(bench.plan.host(name), *command)) as running:
        try:
            looks = ["sh", "-c", f"pgrep -fa '^/usr/bin/python3 .*{uuid}' || :"]
            until(lambda: bench.inside(name, *looks) != "", limit=SOON)
            yield
        finally:
            running.kill()
            bench.inside(name, "pkill", "-f", "time.sleep")
