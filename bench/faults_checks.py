"""Check the invariants that must hold after every round. `Speakers` is pure."""

import json
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.faults_plan import Victim
from bench.faults_scene import FILES, GUEST, HOSTS, Scene
from vmckpt.errors import LabError
from vmckpt_lab import host, ledger
from vmckpt_lab.processes import Census

_LOOKS = 0.1
_RUNS = 5_000_000
"""Nanoseconds of CPU time per second above which a guest counts as running."""


@dataclass(slots=True)
class Speakers:
    """Counts the packets that guests' taps receive from QEMU on each host, in successive readings.

    In a takeover, the old host sends in the first part of an interval and the new host in the last
    part. Two hosts that both sent in two consecutive intervals sent at the same time.
    """

    seen: list[str] = field(default_factory=list)
    packets: dict[str, int] = field(default_factory=dict)
    """Number of packets that the guests on each host have sent."""
    _before: dict[tuple[str, str], int] = field(default_factory=dict)
    _spoke: frozenset[str] = frozenset()

    def take(self, taps: Mapping[tuple[str, str], int], at: float) -> None:
        """Take a reading. `taps`: number of packets by host and tap. `at`: time, in seconds."""
        now = set()
        for (where, tap), count in taps.items():
            more = count - self._before.get((where, tap), count)
            if more > 0:
                now.add(where)
                self.packets[where] = self.packets.get(where, 0) + more
        if len(now & self._spoke) > 1:
            self.seen.append(f"at {at:.2f}: guests speak on {' and '.join(sorted(now))}")
        self._before, self._spoke = dict(taps), frozenset(now)


class TapWatch:
    """Reads the packet counters of all taps periodically. Use as a context manager."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="taps", daemon=True)
        self.speakers = Speakers()

    def __enter__(self) -> "TapWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOKS):
            taps: dict[tuple[str, str], int] = {}
            for name in HOSTS:
                with suppress(OSError, LabError):
                    table = Path(f"/proc/{self._scene.first(name)}/net/dev").read_text()
                    taps |= {(name, tap): count for tap, count in counted(table).items()}
            self.speakers.take(taps, time.monotonic())


def counted(table: str) -> dict[str, int]:
    """Return how many packets each tap in a /proc/net/dev table received from its QEMU."""
    found = {}
    for line in table.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip().startswith("vnet"):
            found[name.strip()] = int(numbers.split()[1])
    return found


def runs_on(scene: Scene, seconds: float = 0.4) -> list[str]:
    """Return the hosts on which the guest's vCPUs run during the next `seconds`."""
    census = Census(scene.plan)
    before = {one: census.ran(one) for one in census.copies(GUEST)}
    time.sleep(seconds)
    return [one.host for one, ran in before.items() if census.ran(one) - ran > _RUNS * seconds]


def ledgers(scene: Scene) -> list[str]:
    """Return the errors in the guest's ledgers of memory, disk and output."""
    try:
        audit = ledger.audit(scene.plan, GUEST)
    except LabError as exc:
        return [f"ledgers: {exc}"]
    return [f"ledger of {one.name}: {one.text}" for one in audit.entries if not one.whole]


def left(scene: Scene, home: str | None) -> list[str]:
    """Return what the protection left on both hosts, in QEMU and in the lease store.

    `home`: the host on which the guest runs, or None.
    """
    found = []
    for name in HOSTS:
        with suppress(OSError, LabError):
            folder = scene.inside(name, FILES)
            found += [f"{name}: {one.name}" for one in folder.glob("*")]
        for what in (Victim.AGENT, Victim.WATCHDOG, Victim.DISK_LOG):
            found += [f"{name}: {what} {one}" for one in scene.victims(name, what)]
        if name != home:
            found += [f"{name}: QEMU {one}" for one in scene.qemus(name)]
            found += [f"{name}: knows {one}" for one in _listed(scene, name)]
    if home is not None:
        found += [f"{home}: {one}" for one in _on_qemu(scene, home)]
        if GUEST not in _listed(scene, home, "--persistent"):
            found.append(f"{home}: its definition is not stored")
    if lease := scene.lease():
        found.append(f"lease: {lease}")
    return found


def _listed(scene: Scene, name: str, *more: str) -> list[str]:
    told = _told(scene, name, "virsh", "-q", "list", "--all", "--name", *more)
    return told.split()


def _on_qemu(scene: Scene, name: str) -> list[str]:
    """Return the filters, block jobs and capabilities that an unprotected guest would not have."""

    def qmp(command: str, **arguments: object) -> list[dict[str, object]]:
        text = json.dumps({"execute": command, "arguments": arguments})
        told = _told(scene, name, "virsh", "qemu-monitor-command", GUEST, text)
        return list(json.loads(told)["return"])

    try:
        objects = [str(one["name"]) for one in qmp("qom-list", path="/objects")]
        jobs = [f"block job {one['device']}" for one in qmp("query-block-jobs")]
        told = qmp("query-migrate-capabilities")
    except (LabError, ValueError, KeyError) as exc:
        return [f"QEMU cannot be queried: {exc}"]
    on = {str(one["capability"]) for one in told if one["state"]}
    found = [f"object {one}" for one in objects if "vmckpt" in one] + jobs
    return found + [f"capability {one}" for one in sorted(on ^ {"events"})]


def _told(scene: Scene, name: str, *command: str) -> str:
    """Run a command on a host and return its output. Raises LabError if it fails."""
    words = host.enter(scene.plan.host(name), *command)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise LabError(f"{name}: {' '.join(command[:3])}: {done.stderr.strip()[-200:]}")
    return done.stdout
