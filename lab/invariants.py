"""Check a guest's invariants after a fault: a single copy, intact, and nothing left behind.

`violations`, `truthful` and `Together` decide and are pure; `Checker` and `Lookout` observe. A copy
is running if the CPU time of its vCPU threads grows; in a paused guest, it stays constant. The CPU
time can be read even without libvirtd.
"""

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from vmckpt import inventory
from vmckpt.errors import HypervisorError, LabError
from vmckpt.hypervisor import domains as hypervisor_domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.migration import LibvirtMigrationDriver
from vmckpt.model.guest import Guest, GuestState
from vmckpt.units import Seconds
from vmckpt_lab import guest_image, guests, host, ledger
from vmckpt_lab.faults import inject
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.observer import client
from vmckpt_lab.plan import HostPlan, LabPlan
from vmckpt_lab.processes import Census, QemuCopy

# QEMU's default downtime limit. The limit must be restored if a guest stays on its source.
USUAL_DOWNTIME = Seconds(0.3)
_FOLDERS = (
    "run/libvirt/qemu",
    "var/lib/libvirt/qemu",
    "var/lib/libvirt/qemu/channel/target",
    "dev/shm/ram/libvirt/qemu",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """The state of a guest on one host."""

    host: str
    processes: int = 0
    in_parts: bool = False
    """Whether the guest is in post-copy, with part of its memory on another host."""
    state: GuestState | None = None
    """The guest's state; None: the host's libvirt does not know the guest."""
    persistent: bool = False
    job: str | None = None
    max_downtime: Seconds | None = None
    """QEMU's downtime limit; None: not running here, in post-copy, or libvirt does not answer."""
    files: tuple[str, ...] = ()
    """Files that a QEMU process left behind when it exited."""
    error: str | None = None
    """The error message if libvirt does not answer."""

    @property
    def runs(self) -> bool:
        return (
            self.processes == 1 and self.state is not None and self.state.runs and not self.in_parts
        )


def violations(seen: Sequence[HostCopy], *, allowed: Iterable[str]) -> list[str]:
    """Return all violations of the rule that a guest runs on exactly one of the allowed hosts."""
    allowed = set(allowed)
    wrong = [f"{one.host} does not answer: {one.error}" for one in seen if one.error]
    places = [one.host for one in seen if one.processes]
    if sum(one.processes for one in seen) != 1:
        wrong.append(f"{sum(o.processes for o in seen)} QEMU processes, on {places or 'no host'}")
    for one in seen:
        if one.processes:
            wrong += _at_home(one, allowed)
        else:
            wrong += _away(one, several=bool(places))
    return wrong


def _at_home(one: HostCopy, allowed: set[str]) -> list[str]:
    wrong = []
    if one.host not in allowed:
        wrong.append(f"the guest is on {one.host}, not on {' or '.join(sorted(allowed))}")
    if one.state is None or not one.state.runs:
        wrong.append(f"{one.host} reports the guest as {one.state or 'absent'}")
    if one.in_parts:
        wrong.append(f"part of the guest's memory is not on {one.host}")
    if not one.persistent:
        wrong.append(f"the guest is running but not defined on {one.host}")
    if one.job is not None:
        wrong.append(f"the guest has a job on {one.host}: {one.job}")
    if one.max_downtime not in (None, USUAL_DOWNTIME):
        wrong.append(f"the guest's downtime limit is {one.max_downtime:g} s on {one.host}")
    return wrong


def _away(one: HostCopy, *, several: bool) -> list[str]:
    """Return the violations on a host without a QEMU process of the guest.

    `several`: whether another host has such a process; a definition on this host is then a
    violation.
    """
    wrong = [f"left on {one.host}: {file}" for file in one.files]
    if one.state is not None and one.state.is_active:
        wrong.append(f"{one.host} reports the guest as {one.state}, but has no QEMU process")
    elif one.state is not None and several:
        wrong.append(f"the guest is still defined on {one.host}")
    return wrong


_STAYED = ("cancelled", "timed-out", "not-converged", "failed")


def truthful(outcome: str | None, places: Sequence[str], *, source: str, target: str) -> str | None:
    """Return how an outcome contradicts `places`, the guest's hosts; None if it does not."""
    where = f"the guest is on {' and '.join(places) or 'no host'}"
    if outcome == "completed" and list(places) != [target]:
        return f"the reported outcome is {outcome}, but {where}"
    if outcome in _STAYED and list(places) != [source]:
        return f"the reported outcome is {outcome}, but {where}"
    if outcome in ("shut-off", "lost") and places:
        return f"the reported outcome is {outcome}, but {where}"
    return None


class Checker:
    """Checks guests on a lab's hosts."""

    def __init__(self, plan: LabPlan) -> None:
        self._plan = plan
        self._census = Census(plan)
        self._inventory = inventory.load(plan.inventory)

    def look(self, guest: str) -> list[HostCopy]:
        """Return the state of a guest on every host that is up."""

        async def everywhere() -> list[HostCopy]:
            up = [one for one in self._plan.hosts if host.is_up(one)]
            return list(await asyncio.gather(*(self._one(one, guest) for one in up)))

        return asyncio.run(everywhere())

    async def _one(self, where: HostPlan, guest: str) -> HostCopy:
        found: Guest | None = None
        limit: Seconds | None = None
        error: str | None = None
        in_parts = False
        async with Hypervisor(self._inventory.host(where.name)) as hypervisor:
            try:
                found = await hypervisor_domains.find_guest(hypervisor, guest)
                if found is not None and found.state.is_active:
                    seen = await hypervisor_domains.presence(hypervisor, found.uuid)
                    in_parts = seen.post_copy
                if found is not None and found.state.runs and not in_parts:
                    limit = await LibvirtMigrationDriver(
                        hypervisor, hypervisor, found.uuid
                    ).max_downtime()
            except HypervisorError as exc:
                error = exc.message
        processes = [copy for copy in self._census.copies(guest) if copy.host == where.name]
        return HostCopy(
            host=where.name,
            processes=len(processes),
            in_parts=in_parts,
            state=found.state if found is not None else None,
            persistent=found is not None and found.persistent,
            job=found.job if found is not None else None,
            max_downtime=limit,
            files=() if processes else tuple(_left(where, guest)),
            error=error,
        )

    def places(self, guest: str) -> list[str]:
        """Return the hosts with a QEMU process of the guest."""
        return [copy.host for copy in self._census.copies(guest)]

    def settled(self, guest: str, allowed: Iterable[str], *, limit: float = 10.0) -> list[str]:
        """Return a guest's violations. Waits up to `limit` seconds for libvirt's cleanup."""
        give_up = Deadline(limit)
        while (wrong := violations(self.look(guest), allowed=allowed)) and not give_up.passed():
            time.sleep(0.2)
        return wrong

    def ledgers(self, guest: str) -> list[str]:
        """Return the errors in a guest's three ledgers."""
        try:
            audit = ledger.audit(self._plan, guest)
        except LabError as exc:
            return [f"the ledgers are unknown: {exc.message}; {self._pulse(guest)}"]
        return [f"{one.name} ledger: {one.text}" for one in audit.entries if not one.whole]

    def _pulse(self, guest: str) -> str:
        """Describe the state of a guest that does not answer."""
        seen = client.status(self._plan.observer_socket, guest)
        since = "never" if seen.answered_at is None else f"{seen.now - seen.answered_at:.1f} s ago"
        words = [f"last answer: {since}; highest number sent: {seen.highest}"]
        copies = self._census.copies(guest)
        before = [self._census.ran(copy) for copy in copies]
        time.sleep(0.5)
        for copy, ran in zip(copies, before, strict=True):
            share = (self._census.ran(copy) - ran) / 5e6
            words.append(f"{copy} uses {share:.0f} % of a CPU")
            console = self._plan.host(copy.host).root / f"log/{guest}.console"
            if console.exists():
                last = console.read_text(errors="replace").strip().splitlines()[-1:]
                words.append(f"its console ends with {' '.join(last)!r}")
        return "; ".join(words)

    def strays(self, guest: str, source: str) -> list[str]:
        """Return a violation for each private image of a guest, except on `source` and its host."""
        home = self.places(guest)
        return [
            f"left on {one.name}: {path}"
            for one in self._plan.hosts
            if one.name not in (*home, source)
            for path in (one.root / "private").glob(f"{guest}.*")
        ]

    def image(self, guest: str, on: str) -> list[str]:
        """Check the disk of a lost guest: every number that the guest sent must be on the disk.

        `on`: the host that the guest ran on. Raises BadInput, LabError, OSError. Returns the
        violations. For raw disks only.
        """
        known = guests.find(self._plan, guest)
        seen = client.status(self._plan.observer_socket, guest)
        path = guests.disk_seen_from(self._plan, known, on)
        records = ledger.read_records(path.read_bytes(), seen.run, seen.highest)
        wrong = [f"{records.broken} broken records on its disk"] if records.broken else []
        if records.highest < seen.highest:
            wrong.append(f"it sent {seen.highest}, but its disk contains only {records.highest}")
        if seen.conflicts or seen.forgotten:
            wrong.append(f"output: {seen.conflicts} numbers sent twice, {seen.forgotten} forgotten")
        return wrong

    def revive(self, guest: str, on: str) -> list[str]:
        """Remove all remains of a guest and boot it from its disk. Returns the violations.

        `on`: the host to boot it on. Raises BadInput, LabError, HypervisorError.
        """
        known = guests.find(self._plan, guest)
        client.ask(self._plan.observer_socket, op="forget", guest=guest)
        xml = guests.domain_xml(self._plan, known, guest_image.prepare())
        inject.root_out(self._plan, guest)
        asyncio.run(self._start(on, xml))
        client.ask(self._plan.observer_socket, op="watch", guest=guest, address=known.address)
        give_up = Deadline(40.0)
        while client.status(self._plan.observer_socket, guest).heard < 5:
            if give_up.passed():
                return [f"the guest does not answer after its restart on {on}"]
            time.sleep(0.05)
        return []

    async def _start(self, on: str, xml: str) -> None:
        async with Hypervisor(self._inventory.host(on)) as hypervisor:
            await hypervisor_domains.define_and_start(hypervisor, xml)


def _left(where: HostPlan, guest: str) -> list[str]:
    """Return the files that a QEMU process left in a host's private directories when it exited.

    Files older than the host's power-on are ignored, as libvirt forgets them after a power cut.
    """
    pid = host.first_process(where)
    if pid is None:
        return []
    # The boot script is rewritten at each power-on.
    root, on_since = Path(f"/proc/{pid}/root"), (where.root / "boot.sh").stat().st_mtime
    found = []
    for folder in _FOLDERS:
        with suppress(OSError):  # the directory does not exist, or the file was just removed
            for path in (root / folder).iterdir():
                mine = path.name.startswith(f"{guest}.") or path.name.endswith(f"-{guest}")
                if mine and path.stat().st_mtime > on_since:
                    found.append(f"/{folder}/{path.name}")
    return found


INTERVAL = 0.1
# The vCPU threads of a paused guest may wake up, but use less CPU time than this per interval.
RUNS = 4_000_000


@dataclass(slots=True)
class Together:
    """Detects copies that run at the same time, from successive readings of their CPU time.

    In a switchover, the source runs in the first part of an interval and the target in the last
    part. Two copies that both ran in two consecutive intervals ran at the same time.
    """

    seen: list[str] = field(default_factory=list)
    """The findings, one sentence each."""
    _before: Mapping[QemuCopy, int] = field(default_factory=dict)
    _ran_before: frozenset[QemuCopy] = frozenset()

    def take(self, ran: Mapping[QemuCopy, int], at: float) -> None:
        """Take a reading. `ran`: CPU time of every copy, in nanoseconds. `at`: time, in seconds."""
        now = frozenset(
            copy for copy, time_ in ran.items() if time_ - self._before.get(copy, time_) > RUNS
        )
        both = sorted(now & self._ran_before)
        for first, second in pairwise(both):
            if first.guest == second.guest:
                self.seen.append(f"at {at:.2f}: {first} runs, and so does {second}")
        self._before, self._ran_before = dict(ran), now


class Lookout:
    """Watches a lab for two running copies of a guest. Use as a context manager."""

    def __init__(self, plan: LabPlan) -> None:
        self._census = Census(plan)
        self._together = Together()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lookout", daemon=True)
        self._lock = threading.Lock()
        self.looks = 0

    def __enter__(self) -> "Lookout":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def two_copies(self) -> list[str]:
        """Return and clear the findings about two running copies of a guest.

        Raises LabError if the thread that looks for them has died.
        """
        if not self._thread.is_alive():
            raise LabError(
                "the thread that checks for two running copies has died; whether two copies ran is"
                " unknown"
            )
        with self._lock:
            found, self._together.seen = self._together.seen, []
        return found

    def _look(self) -> None:
        while not self._over.wait(INTERVAL):
            ran = {copy: self._census.ran(copy) for copy in self._census.copies()}
            with self._lock:
                self._together.take(ran, time.monotonic())
            self.looks += 1
