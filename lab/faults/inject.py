"""Inject faults into processes, disks, memory and clocks of a lab.

Faults of links and power are in `network` and `host`.
"""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import LabError
from vmckpt_lab import host, network
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.plan import LabPlan
from vmckpt_lab.processes import Census, QemuCopy
from vmckpt_lab.shell import run, start_daemon

_FAKETIME = "/usr/lib/*-linux-gnu/faketime/libfaketimeMT.so.1"
_FILLER = "filler"
_CHUNK = 1 << 16


def kill(pid: int) -> bool:
    """Send SIGKILL. Returns whether the process existed."""
    return send(pid, signal.SIGKILL)


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal. Returns whether the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def libvirtd(plan: LabPlan, name: str) -> int:
    """Return the process ID of a host's libvirtd. Raises LabError if it is not running."""
    pid = Census(plan).daemon(name, "libvirtd")
    if pid is None:
        raise LabError(f"libvirtd is not running on host {name}")
    return pid


def qemu(plan: LabPlan, guest: str, name: str) -> QemuCopy | None:
    """Return the guest's QEMU process on a host, or None."""
    found = [copy for copy in Census(plan).copies(guest) if copy.host == name]
    return found[0] if found else None


def start_libvirtd(plan: LabPlan, name: str) -> None:
    """Start libvirtd on a host and wait until it answers.

    Does nothing if libvirtd is running or the host is off. Raises LabError.
    """
    chosen = plan.host(name)
    if not host.is_up(chosen) or Census(plan).daemon(name, "libvirtd") is not None:
        return
    run(host.enter(chosen, "/usr/sbin/libvirtd", "--daemon", "--listen"))
    host.wait_until_up(chosen)


def starve(plan: LabPlan, name: str, *, spare: int) -> None:
    """Limit the memory of a host's libvirtd to its current size plus `spare` bytes.

    New QEMU processes inherit the limit. Raises LabError if libvirtd is not running.
    """
    pid = libvirtd(plan, name)
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.prlimit(pid, resource.RLIMIT_DATA, (used + spare, resource.RLIM_INFINITY))


def feed(plan: LabPlan, name: str) -> None:
    """Undo `starve`."""
    everything = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    if (pid := Census(plan).daemon(name, "libvirtd")) is not None:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_DATA, everything)


class SmallDisk:
    """A file system of a few MiB, mounted on a directory of this machine or of a lab host."""

    def __init__(self, folder: Path, *, mib: int, plan: LabPlan, name: str | None = None) -> None:
        """`mib`: size in MiB. `name`: the host; None: this machine."""
        self._folder = folder
        self._mib = mib
        self._plan = plan
        self._name = name

    def mount(self) -> None:
        options = f"size={self._mib}m,mode=755"
        self._run("mount", "-t", "tmpfs", "-o", options, "vmckpt", str(self._folder))

    def fill(self) -> None:
        """Fill the file system to the last byte, including space that is freed meanwhile."""
        filler = self.seen / _FILLER
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            size = _CHUNK
            while size:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    size //= 2

    def free(self) -> None:
        (self.seen / _FILLER).unlink(missing_ok=True)

    def unmount(self) -> None:
        """Unmount the file system, if it is still mounted."""
        with suppress(LabError):
            self._run("umount", "--lazy", str(self._folder))

    @property
    def seen(self) -> Path:
        """The directory's path, as seen from this machine. Raises LabError if the host is off."""
        if self._name is None:
            return self._folder
        pid = host.first_process(self._plan.host(self._name))
        if pid is None:
            raise LabError(f"host {self._name} is off")
        return Path(f"/proc/{pid}/root") / self._folder.relative_to("/")

    def _run(self, *args: str) -> None:
        here = list(args) if self._name is None else None
        run(here or host.enter(self._plan.host(self._name or ""), *args))


class Clock:
    """An adjustable wall clock for a process. The monotonic clock is not affected."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump(0)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a process that uses this clock. Raises LabError if faketime is missing."""
        found = sorted(Path("/").glob(_FAKETIME.lstrip("/")))
        if not found:
            raise LabError("faketime is not installed", hint="run apt-get install faketime")
        return {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, seconds: int) -> None:
        """Set the offset of the clock from the real time, in seconds."""
        partial = self._file.with_suffix(".new")
        partial.write_text(f"{seconds:+d}s\n")
        partial.rename(self._file)


def restart_postgres(plan: LabPlan, *, limit: float = 30.0) -> None:
    """Restart the lease store's PostgreSQL without a clean shutdown. Raises LabError.

    `limit`: how long each of stop and start may take, in seconds.
    """
    start_postgres(plan, stop_postgres(plan, limit=limit), limit=limit)


def stop_postgres(plan: LabPlan, *, limit: float = 30.0) -> list[str]:
    """Stop the lease store's PostgreSQL without a clean shutdown.

    Returns the command line that starts it again. Raises LabError if it does not stop within
    `limit` seconds.
    """
    data = plan.folder / "witness"
    postmaster = int((data / "postmaster.pid").read_text().split()[0])
    command = Path(f"/proc/{postmaster}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    os.kill(postmaster, signal.SIGQUIT)
    _until(
        lambda: not Path(f"/proc/{postmaster}").exists(), "PostgreSQL did not stop in time", limit
    )
    return command


def start_postgres(plan: LabPlan, command: list[str], *, limit: float = 30.0) -> None:
    """Start the lease store's PostgreSQL with the command line from `stop_postgres`.

    Raises LabError if it does not start within `limit` seconds.
    """
    as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
    inside = ["ip", "netns", "exec", plan.witness_namespace, *as_postgres, *command]
    start_daemon(inside, plan.folder / "witness.log")
    ready = [str(Path(command[0]).parent / "pg_isready"), "-q", "-h", plan.witness_address]
    _until(
        lambda: subprocess.run(ready, check=False).returncode == 0,
        f"PostgreSQL did not start in time; see {plan.folder}/witness.log",
        limit,
    )


def _until(condition: Callable[[], bool], trouble: str, limit: float) -> None:
    give_up = Deadline(limit)
    while not condition():
        if give_up.passed():
            raise LabError(trouble)
        time.sleep(0.05)


def root_out(plan: LabPlan, guest: str) -> None:
    """Kill every QEMU process of a guest, and undefine the guest on every host that is up.

    If libvirtd refuses, it is restarted: after the source of a post-copy migration has died,
    libvirt 9.0 keeps the job until a restart. Raises LabError if the guest cannot be undefined.
    """
    for copy in Census(plan).copies(guest):
        kill(copy.pid)
    for one in plan.hosts:
        if host.is_up(one) and not _forgotten(plan, one.name, guest):
            kill(libvirtd(plan, one.name))
            start_libvirtd(plan, one.name)
            if not _forgotten(plan, one.name, guest):
                raise LabError(f"guest {guest} cannot be undefined on host {one.name}")


def _forgotten(plan: LabPlan, name: str, guest: str, *, limit: float = 5.0) -> bool:
    """Undefine a guest that has no QEMU process. Returns whether the guest is undefined."""
    give_up = Deadline(limit)
    while True:
        listed = run(host.enter(plan.host(name), "virsh", "-q", "list", "--all", "--name"))
        if guest not in listed.split():
            return True
        if give_up.passed():
            return False
        undefine = ["timeout", "3", "virsh", "-q", "undefine", guest]
        run(host.enter(plan.host(name), *undefine), check=False)


def mend_everything(plan: LabPlan) -> None:
    """Restore power, links, memory and libvirtd of every host, and remove bandwidth limits.

    Raises LabError if a host does not start.
    """
    for one in plan.hosts:
        network.heal(plan, one.name)
        if not host.is_up(one):
            host.power_on(plan, one)
            host.wait_until_up(one)
        feed(plan, one.name)
        start_libvirtd(plan, one.name)
        network.shape(plan, one.name, None)
