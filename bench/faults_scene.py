"""The lab of the fault campaign: its processes, its lease store, and vmckpt commands."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import points
from bench.faults_plan import Victim
from vmckpt.errors import LabError, RemoteError
from vmckpt.replication import control_socket
from vmckpt_lab import guests, host, lab, network
from vmckpt_lab.faults import inject
from vmckpt_lab.faults.inject import Clock
from vmckpt_lab.lease_store_pair import WitnessPair
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.observer import client
from vmckpt_lab.observer.analysis import View
from vmckpt_lab.plan import LabPlan

GUEST = "web1"
WISHES: Mapping[str, Any] = {
    "memory": "128MiB", "dirty": "8MiB@3MiB/s", "disk": "16MiB", "shared_memory": True,
}  # fmt: skip
HOSTS = ("alpha", "beta")
FILES = "run/vmckpt/replication"
_ROOT = Path(__file__).parent.parent
_STOP_AT = "/run/vmckpt-stop-at"
_CLOCK = "/run/vmckpt-clock"
_COMMAND = 90.0
_REPLICA, _ORDERS = b"vmckpt.agent.replication.main", (b"vmckpt.agent.main", b"/vmckpt-agent")
_GUARD = b"vmckpt.replication.watchdog.process"
_UNDO = (b"vmckpt.capture.memory.undo_process", b"vmckpt.capture.network_hold_undo_process")


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a command. `code` is None if the command hung and was killed."""

    words: tuple[str, ...]
    code: int | None
    out: str
    err: str

    def __str__(self) -> str:
        last = (self.err.strip() or self.out.strip()).splitlines()[-1:] or [""]
        said = last[0][:300].replace(f"{_ROOT}/", "")  # results are saved
        return f"vmckpt {' '.join(self.words)}: exit code {self.code}: {said}"


@dataclass
class Command:
    """A running vmckpt command."""

    words: tuple[str, ...]
    process: subprocess.Popen[str]

    def end(self, limit: float = _COMMAND) -> Done:
        """Wait until the command exits. Kills it after `limit` seconds."""
        deadline = Deadline(limit)
        while True:
            with suppress(subprocess.TimeoutExpired):
                out, err = self.process.communicate(timeout=1.0)
                return Done(self.words, self.process.returncode, out, err)
            if deadline.passed():
                self.process.kill()
                out, err = self.process.communicate()
                return Done(self.words, None, out, err)


@dataclass
class Scene:
    """A running lab."""

    plan: LabPlan
    pair: WitnessPair
    clock: Clock
    """The lease store's clock."""
    policy: Path
    _first: dict[str, int] = field(default_factory=dict)

    # -- vmckpt ------------------------------------------------------------------------------------

    def start(self, *words: str) -> Command:
        """Start a vmckpt command."""
        more = {
            "VMCKPT_INVENTORY": str(self.plan.inventory),
            "VMCKPT_STATE": str(self.plan.folder / "state"),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "vmckpt.cli.app", *words], env={**os.environ, **more},
            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        return Command(words, process)

    def run(self, *words: str) -> Done:
        """Run a vmckpt command and wait until it exits."""
        return self.start(*words).end()

    def protect(self, backup: str) -> Command:
        return self.start("protect", GUEST, "--to", backup, "--policy", str(self.policy), "--json")

    # -- observation -------------------------------------------------------------------------------

    def first(self, name: str) -> int | None:
        """Return the ID of the host's first process; None if the host is off."""
        known = self._first.get(name)
        if known is None or not Path(f"/proc/{known}").exists():
            found = host.first_process(self.plan.host(name))
            if found is None:
                self._first.pop(name, None)
                return None
            self._first[name] = known = found
        return known

    def inside(self, name: str, path: str) -> Path:
        """Return a host's path as seen from this machine. Raises LabError if the host is off."""
        first = self.first(name)
        if first is None:
            raise LabError(f"host {name} is off")
        return Path(f"/proc/{first}/root") / path.lstrip("/")

    def processes(self, name: str) -> dict[int, list[bytes]]:
        """Return the processes of a host with their command lines."""
        wanted = Path("/run/netns", self.plan.host(name).namespace).stat().st_ino
        found = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with suppress(OSError):
                    if Path(f"/proc/{entry.name}/ns/net").stat().st_ino == wanted:
                        words = Path(f"/proc/{entry.name}/cmdline").read_bytes()
                        found[int(entry.name)] = words.split(b"\0")
        return found

    def victims(self, name: str, what: Victim, *, order: bool = False) -> list[int]:
        """Return the processes of a kind. `order`: the agent is one that executes an order."""
        return [one for one, words in self.processes(name).items() if _is(words, what, order=order)]

    def qemus(self, name: str) -> list[int]:
        return [
            one for one, words in self.processes(name).items()
            if words[0].rpartition(b"/")[2].startswith(b"qemu-system")
        ]  # fmt: skip

    def seen(self, **window: float) -> View:
        return client.status(self.plan.observer_socket, GUEST, **window)

    def heard(self, since: float) -> bool:
        return (self.seen().answered_at or 0.0) > since

    def asked(self, name: str) -> dict[str, Any]:
        """Return the status of a host's agent; empty if no agent answers."""
        with suppress(OSError, LabError):
            for folder in self.inside(name, FILES).glob("*"):
                with suppress(RemoteError):
                    return control_socket.ask(folder, {})
        return {}

    def lease(self) -> dict[str, str]:
        """Return the guest's lease from the lease store; empty if there is none."""
        keys = ("state", "token", "holder", "timeline")
        told = self.pair.sql(
            f"SELECT {', '.join(keys)} FROM vmckpt_lease.lease WHERE role IS NOT NULL"
        )
        return dict(zip(keys, told.split("|"), strict=False)) if told else {}

    def logs(self) -> dict[str, str]:
        """Return the last lines of the logs of agents, watchdogs and QEMU."""
        found = {}
        for name in HOSTS:
            for one in (self.plan.host(name).root / "log/qemu").glob("*.log"):
                text = one.read_text(errors="replace")
                found[f"{name}: QEMU of {one.stem}"] = "\n".join(text.splitlines()[-12:])
            with suppress(OSError, LabError):
                for one in sorted(self.inside(name, FILES).glob("*/*")):
                    if one.suffix == ".log" or one.name in ("killed", "outcome.json", "token"):
                        text = one.read_text(errors="replace")
                        found[f"{name}: {one.name}"] = "\n".join(text.splitlines()[-120:])
        return found

    # -- steps -------------------------------------------------------------------------------------

    def arm(self, name: str, step: str) -> None:
        """Stop the next process on a host that reaches the step."""
        file = self.inside(name, _STOP_AT)
        file.with_name(file.name + points.STOPPED).unlink(missing_ok=True)
        partial = file.with_name(f"{file.name}.new")
        partial.write_text(step)
        partial.rename(file)

    def disarm(self) -> None:
        for name in HOSTS:
            with suppress(OSError, LabError):
                self.inside(name, _STOP_AT).unlink(missing_ok=True)

    def stopped(self, name: str, limit: float) -> int | None:
        """Return the process that stopped at the armed step; None after `limit` seconds."""
        give_up = Deadline(limit)
        while not give_up.passed():
            with suppress(OSError, ValueError, LabError):
                number = self.inside(name, _STOP_AT + points.STOPPED).read_text()
                for one in self.processes(name):
                    if _inner(one) == number and _state(one) == "T":
                        return one
            time.sleep(0.02)
        return None

    def jump(self, name: str, seconds: int) -> None:
        """Set the offset of the wall clock of every agent on a host."""
        self.inside(name, _CLOCK).write_text(str(seconds))


def set_environment(plan: LabPlan, name: str) -> None:
    """Set the variables that points need, for all processes that ssh starts on a host."""
    chosen = plan.host(name)
    # If an agent is on the path, no Python is started to search for one.
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    modules = f"{_ROOT}/bench/stopping:{_ROOT}"
    told = {"PATH": path, "PYTHONPATH": modules, points.VARIABLE: _STOP_AT, points.CLOCK: _CLOCK}
    file = chosen.root / "etc/ssh/lab_sshd_config"
    lines = [one for one in file.read_text().splitlines() if not one.startswith("SetEnv")]
    lines.append("SetEnv " + " ".join(f"{key}={value}" for key, value in told.items()))
    file.write_text("\n".join(lines) + "\n")
    first = host.first_process(chosen)
    if first is not None:
        daemon = (Path(f"/proc/{first}/root/run/sshd.pid")).read_text().strip()
        subprocess.run(host.enter(chosen, "kill", "-HUP", daemon), check=True)
        time.sleep(0.3)  # the old sshd still listens for a moment
        host.wait_until_up(chosen)


@contextmanager
def scene(name: str, ttl: float) -> Iterator[Scene]:
    """Yield a new lab for a campaign, and remove the lab at the end."""
    plan = lab.up(name, with_witness=True)
    try:
        for one in HOSTS:
            set_environment(plan, one)
        times = plan.folder / "clock"
        times.mkdir()
        clock = Clock(times / "store")
        pair = WitnessPair(plan, clock.environment)
        policy = plan.folder / "faults.yaml"
        policy.write_text(
            "version: vmckpt/v1\nname: faults\nprotect: {interval: 300ms, hold: 1.5s,"
            f" failover: automatic, lease: {ttl:g}s}}\n"
        )
        yield Scene(plan, pair, clock, policy)
    finally:
        lab.down(name)


def begin(made: Scene, on: str) -> None:
    """Start a new guest."""
    guests.start(made.plan, GUEST, on, **WISHES)


def heal(made: Scene) -> None:
    """Resume stopped processes, and restore clocks, networks, libvirtd and power."""
    for name in HOSTS:
        with suppress(LabError):
            made.inside(name, _CLOCK).unlink(missing_ok=True)
        go_on(made, name)
        inject.start_libvirtd(made.plan, name)
    network.unmute(f"{made.plan.prefix}witness")
    network.unmute(f"{made.plan.prefix}replica")
    made.clock.jump(0)
    for name in HOSTS:
        lab.heal(made.plan, name)


def go_on(made: Scene, name: str) -> None:
    """Resume all stopped processes of a host."""
    for one in made.processes(name):
        if _state(one) == "T":
            inject.send(one, signal.SIGCONT)


def _is(words: list[bytes], what: Victim, *, order: bool) -> bool:
    program = words[0].rpartition(b"/")[2]
    return {
        Victim.AGENT: b"python" in program
        and any(one == _REPLICA if not order else one.endswith(_ORDERS) for one in words),
        Victim.WATCHDOG: _GUARD in words,
        Victim.LIBVIRTD: program == b"libvirtd",
        Victim.UNDO: any(one in words for one in _UNDO),
        Victim.DISK_LOG: program == b"nbdkit",
    }[what]


def _inner(process: int) -> str:
    """Return a process's ID inside its host; empty if the process is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[-1]
    return ""


def _state(process: int) -> str:
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{process}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]
    return ""
