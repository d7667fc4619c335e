"""Measure the dashboard with a large fleet: its cost, and how quickly it responds to keys.

    bench/all --only dashboard

Hosts and guests are simulated, as with --simulate. The jobs are in a real journal, to which another
process writes as 50 controllers would: five samples per second each. The dashboard runs in its own
terminal of 160 by 48 characters. Measured from outside are: the time from the start of the process
until the guests are shown; the CPU time and memory while the list of guests or the list of jobs is
shown; and the time from a key until the first change is drawn. The limits are those of an
application of Textual, the library that draws the dashboard, that only shows what is typed.
Debian and PyPI have no other program that shows a fleet in a terminal.
"""

import argparse
import contextlib
import fcntl
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.figure import Figure, Result

_SIZE = (48, 160)
_TICKS = os.sysconf("SC_CLK_TCK")
HOSTS, GUESTS, JOBS = 1000, 20_000, 50
_BARE = "empty application"
_EMPTY = """
from textual.app import App
from textual.widgets import Input
class Empty(App):
    def compose(self): yield Input(placeholder="ready to measure")
Empty().run()
"""


class Terminal:
    """A dashboard in a pseudo-terminal."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *_SIZE, 0, 0))
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)

    def read(self, limit: float) -> bytes:
        """Return what the dashboard draws; empty if it draws nothing for `limit` seconds."""
        ready, _, _ = select.select([self.master], [], [], limit)
        return os.read(self.master, 1 << 16) if ready else b""

    def until(self, text: bytes, limit: float) -> float:
        """Wait until a text is shown. Returns the time since the start, in seconds."""
        seen, end = b"", time.monotonic() + limit
        while time.monotonic() < end:
            seen = seen[-10_000:] + self.read(0.05)
            if text in seen:
                return time.monotonic() - self.began
        raise SystemExit(f"the dashboard never showed {text!r}: {seen[-2000:]!r}")

    def rest(self, seconds: float) -> None:
        """Read and drop the output for this long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.read(left)

    def key(self, key: bytes) -> float:
        """Press a key. Returns the time until the dashboard draws something, in milliseconds."""
        while self.read(0.0):
            pass
        began = time.monotonic()
        os.write(self.master, key)
        while not self.read(1.0):
            if time.monotonic() - began > 5:
                raise SystemExit("the dashboard did not respond to a key within 5 s")
        return (time.monotonic() - began) * 1000

    def cpu(self) -> float:
        """Return the CPU time of the dashboard so far, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text("utf-8").rpartition(")")[2]
        return sum(int(one) for one in fields.split()[11:13]) / _TICKS

    def memory(self) -> float:
        """Return the peak memory of the dashboard so far, in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text("utf-8")
        line = next(one for one in text.splitlines() if one.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    def close(self) -> None:
        """Kill the dashboard."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.master)


def show(hosts: int, guests: int) -> None:
    """Run the dashboard, with simulated hosts and a real journal."""
    from vmckpt.app.dashboard_source import Live  # noqa: PLC0415
    from vmckpt.inventory import Inventory  # noqa: PLC0415
    from vmckpt.simulation.source import Showing  # noqa: PLC0415
    from vmckpt_tui import app  # noqa: PLC0415

    class Mixed(Live):
        title = "simulated hosts, a real journal"

        def __init__(self, made: Showing) -> None:
            super().__init__(Inventory(path=Path("none"), hosts={}, observer=None))
            self._made = made
            self.fleet = made.fleet  # type: ignore[method-assign]
            self.protections = made.protections  # type: ignore[method-assign]
            self.snapshots = made.snapshots  # type: ignore[method-assign]

    made = Showing(hosts, guests, jobs=0)
    app.run(app.Setting(source=Mixed(made), commands=made))


def write(jobs: int) -> None:
    """Write what controllers write: five samples per second for each job, until killed."""
    from vmckpt.journal import recorder  # noqa: PLC0415
    from vmckpt.journal.records import NewOperation  # noqa: PLC0415
    from vmckpt.model.events import Estimate, Sampled  # noqa: PLC0415
    from vmckpt.model.migration import JobPhase, JobSample  # noqa: PLC0415
    from vmckpt.units import Bytes, BytesPerSecond, Seconds  # noqa: PLC0415

    opened = [
        recorder.begin(
            NewOperation(kind="migrate", guest=f"guest{one}", source="a", target="b"), print
        )
        for one in range(jobs)
    ]
    for one in opened:
        one.update(phase="pre-copy")
    estimate = Estimate(low=Seconds(5.0), high=Seconds(9.0), converging=True)
    for number in range(1 << 30):
        for one in opened:
            one.take(Sampled(
                sample=JobSample(
                    at=Seconds(time.monotonic()), phase=JobPhase.PRE_COPY, iteration=2,
                    remaining=Bytes(1 << 30), total=Bytes(4 << 30), transferred=Bytes(number << 20),
                    bandwidth=BytesPerSecond(1 << 27), dirty_rate=BytesPerSecond(1 << 25),
                    expected_downtime=Seconds(0.3), throttle=0,
                ),
                estimate=estimate, done=number % 1000 / 1000,
            ))  # fmt: skip
        time.sleep(0.2)


@contextlib.contextmanager
def journal(jobs: int) -> Iterator[dict[str, str]]:
    """Yield the environment of a new journal to which another process writes continuously.

    The journal is in memory: 50 controllers that share a disk could not write at this rate.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        environment = {**os.environ, "VMCKPT_STATE": folder, "TERM": "xterm-256color",
                       "COLORTERM": "truecolor"}  # fmt: skip
        words = [sys.executable, "-m", "bench.dashboard", "--write", str(jobs)]
        writer = subprocess.Popen(words, env=environment)
        try:
            time.sleep(4.0)
            yield environment
        finally:
            writer.kill()
            writer.wait()


def measured(seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Measure one run of the dashboard."""
    words = [sys.executable, "-m", "bench.dashboard", "--show", f"{HOSTS}x{GUESTS}"]
    terminal = Terminal(words, environment)
    try:
        start = terminal.until(f"{HOSTS:,} hosts".encode(), 60.0)
        terminal.rest(5.0)
        told: dict[str, Any] = {"start_s": round(start, 3)}
        for part, key in (("fleet", b"1"), ("jobs", b"2")):
            terminal.key(key)
            terminal.rest(2.0)
            before, began = terminal.cpu(), time.monotonic()
            terminal.rest(seconds)
            share = (terminal.cpu() - before) / (time.monotonic() - began) * 100
            told[f"cpu_{part}"] = round(share, 1)
        terminal.key(b"1")
        terminal.rest(2.0)
        keys = [*([b"\x1b[B"] * 60), *([b"\x1b[6~"] * 60), *([b"\x1b[A"] * 60)]
        times = []
        for key in keys:
            times.append(terminal.key(key))
            terminal.rest(0.07)
        terminal.key(b"/")
        terminal.rest(1.0)
        typed = []
        for letter in b"web-1 db-2 app":
            typed.append(terminal.key(bytes([letter])))
            terminal.rest(0.3)
        told |= {
            "key_median_ms": round(statistics.median(times), 1),
            "key_p95_ms": round(statistics.quantiles(times, n=20)[-1], 1),
            "filter_median_ms": round(statistics.median(typed), 1),
            "filter_worst_ms": round(max(typed), 1),
            "memory_mib": round(terminal.memory(), 1),
        }
        return told
    finally:
        terminal.close()


def least(environment: dict[str, str]) -> dict[str, float]:
    """Measure an application that only shows what is typed, in the same way."""
    empty = Terminal([sys.executable, "-c", _EMPTY], environment)
    try:
        found = {"start_s": empty.until(b"ready to measure", 30.0)}
        empty.rest(1.0)
        times = []
        for _ in range(60):
            times.append(empty.key(b"x"))
            empty.rest(0.07)
        return found | {"memory_mib": empty.memory(), "key_ms": statistics.median(times)}
    finally:
        empty.close()


def figures(median: dict[str, float], floor: dict[str, float]) -> tuple[Figure, ...]:
    """Return the figures. Pure."""

    def row(what: str, unit: str, key: str, limit: str = "", limit_is: str = "") -> Figure:
        return Figure(what=what, unit=unit, ours=median[key], limit=floor.get(limit),
                      limit_is=limit_is)  # fmt: skip

    return (
        row("first screen", "s", "start_s", "start_s", _BARE),
        row("memory", "MiB", "memory_mib", "memory_mib", _BARE),
        row("CPU, list of guests", "% of a core", "cpu_fleet"),
        row("CPU, list of jobs", "% of a core", "cpu_jobs"),
        row("from a key to the screen, median", "ms", "key_median_ms", "key_ms", _BARE),
        row("from a key to the screen, 95 %", "ms", "key_p95_ms", "key_ms", _BARE),
        row("a letter typed into the filter, median", "ms", "filter_median_ms", "key_ms", _BARE),
        row("a letter typed into the filter, longest", "ms", "filter_worst_ms", "key_ms", _BARE),
    )  # fmt: skip


def measure(*, quick: bool) -> Result:
    """Measure the dashboard in turn with an empty application."""
    runs, floors = [], []
    with journal(JOBS) as environment:
        for _ in range(1 if quick else 2):
            floors.append(least(environment))
            runs.append(measured(2.0 if quick else 15.0, environment))
    median, floor = (
        {key: statistics.median(one[key] for one in rows) for key in rows[0]}
        for rows in (runs, floors)
    )
    return Result(
        figures=figures(median, floor), versions={"Textual": metadata.version("textual")},
        raw={"hosts": HOSTS, "guests": GUESTS, "jobs": JOBS, "runs": runs, "empty": floors},
    )  # fmt: skip


def main() -> None:
    """Run a part of the benchmark in its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", help="hosts x guests of the dashboard to show")
    parser.add_argument("--write", type=int, help="number of jobs to write samples of")
    args = parser.parse_args()
    if args.show is not None:
        hosts, _, guests = args.show.partition("x")
        show(int(hosts), int(guests))
    if args.write is not None:
        write(args.write)


if __name__ == "__main__":
    main()
