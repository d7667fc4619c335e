"""Memory and CPU time of every process of vmckpt, while a lab uses all of them.

    sudo bench/all --only processes

A guest of 256 MiB that writes 20 MiB/s is protected with 100 ms between epochs, under a lease; the
pages of another guest are tracked since its last snapshot; `vmckpt run` serves metrics. Memory is
each process's proportional share, so that pages which several processes share count once. The limit
is a Python that does nothing; beside it are libvirt's daemon on the same host, and `virsh migrate`.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import hands as lab_hands
from bench.figure import Figure, Result, median
from bench.hands import Hands, versions
from bench.migration import virsh
from bench.replication import GUEST, protect, start
from vmckpt_lab import guests, lab, network

KINDS = {
    "agent of a protected guest": ("alpha", b"vmckpt.agent.replication.main"),
    "agent of a standby": ("beta", b"vmckpt.agent.replication.main"),
    "watchdog of a protected guest": ("alpha", b"vmckpt.replication.watchdog.process"),
    "tracker of a guest with snapshots": ("alpha", b"vmckpt.capture.memory.tracker_process"),
    "waiting agent of a host": ("alpha", b"vmckpt.agent.main"),
    "libvirtd of a host": ("alpha", b"libvirtd"),
}
"""The host and a word of the command line of each process."""
_TICKS = os.sysconf("SC_CLK_TCK")
_METRICS = "9479"
_LIBVIRT = "libvirtd of a host"


def cpu(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory(pid: int) -> float:
    """Return the proportional memory of a process, in MiB; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return int(next(one for one in text.splitlines() if one.startswith("Pss:")).split()[1]) / 1024


def found(hands: Hands) -> dict[str, list[int]]:
    """Return the processes of each kind."""
    known: dict[str, list[int]] = {}
    for kind, (name, word) in KINDS.items():
        for pid in network.processes_in(hands.plan.host(name).namespace):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            program = line.partition(b"\0")[0]
            if word in line and (b"python" in program or word in program):  # no shell of ssh
                known.setdefault(kind, []).append(pid)
    return known


def watched(pids: dict[str, list[int]], seconds: float) -> dict[str, dict[str, float]]:
    """Return the memory and the share of a core of each kind, all its processes together."""
    before = {kind: sum(map(cpu, each)) for kind, each in pids.items()}
    began = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return {
        kind: {"processes": len(each), "mib": sum(map(memory, each)),
               "cpu": 100 * (sum(map(cpu, each)) - before[kind]) / took}
        for kind, each in pids.items()
    }  # fmt: skip


def command(words: list[str], more: dict[str, str]) -> dict[str, float]:
    """Run a command. Returns its peak memory in MiB and its CPU time in seconds."""
    process = subprocess.Popen(words, env={**os.environ, **more}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(words)} exited with {process.returncode}")
    time.sleep(1.5)
    return {"mib": usage.ru_maxrss / 1024, "cpu_s": usage.ru_utime + usage.ru_stime}


def idle_python() -> float:
    """Return the memory of a Python that does nothing, in MiB."""
    words = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return memory(process.pid)


def services(hands: Hands, seconds: float) -> dict[str, dict[str, float]]:
    """Watch all long-lived processes."""
    start(hands.plan)
    protect(hands, "100ms", "--failover", "automatic")
    guests.start(hands.plan, "tracked", "alpha", memory="256MiB", dirty="16MiB@1MiB/s")
    hands.vmckpt("snapshot", "create", "tracked")
    run = subprocess.Popen(
        hands.command("run", "--metrics", _METRICS), env={**os.environ, **hands.environment},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        time.sleep(15.0)
        if run.poll() is not None:
            raise SystemExit(f"vmckpt run ended with {run.returncode}")
        return watched({**found(hands), "vmckpt run --metrics": [run.pid]}, seconds)
    finally:
        run.kill()  # may be killed at any time
        run.wait()
        hands.vmckpt("unprotect", GUEST)
        guests.remove(hands.plan, "tracked")


def moves(hands: Hands, turns: int) -> dict[str, list[dict[str, float]]]:
    """Move the guest there with vmckpt and back with virsh."""
    rows: dict[str, list[dict[str, float]]] = {"vmckpt": [], "virsh": []}
    for _ in range(turns):
        words = hands.command("migrate", GUEST, "--to", "beta", "--tls", "off")
        rows["vmckpt"].append(command(words, hands.environment))
        rows["virsh"].append(command(virsh(hands.plan, GUEST, "beta", "alpha"), {}))
    return rows


def figures(told: dict[str, Any]) -> tuple[Figure, ...]:
    """Return the figures. Pure."""
    nothing: dict[str, Any] = {"limit": told["python_mib"], "limit_is": "idle Python"}
    daemon = told["services"][_LIBVIRT]
    rows: list[Figure] = []
    for kind, one in told["services"].items():
        if kind == _LIBVIRT:
            continue
        rows += [
            Figure(what=f"{kind}: memory", unit="MiB", ours=one["mib"], **nothing,
                   peer=daemon["mib"], peer_is="libvirtd"),
            Figure(what=f"{kind}: CPU", unit="% of a core", ours=one["cpu"]),
        ]  # fmt: skip
    for key, what, unit in (("mib", "peak memory", "MiB"), ("cpu_s", "CPU time", "s")):
        ours, peer = (median(row[key] for row in told["moves"][name])
                      for name in ("vmckpt", "virsh"))  # fmt: skip
        rows.append(
            Figure(what=f"vmckpt migrate: {what}", unit=unit, ours=ours or 0.0, peer=peer,
                   peer_is="virsh migrate", **(nothing if key == "mib" else {}))
        )  # fmt: skip
    return tuple(rows)


def measure(*, quick: bool) -> Result:
    """Use all processes in a lab, and measure them."""
    name = f"bp{os.getpid()}"
    plan = lab.up(name, with_witness=True)
    try:
        hands = lab_hands.begin(plan)
        told: dict[str, Any] = {"python_mib": idle_python()}
        told["services"] = services(hands, 5.0 if quick else 30.0)
        told["moves"] = moves(hands, 1 if quick else 3)
        guests.remove(plan, GUEST)
    finally:
        lab.down(name)
    return Result(figures=figures(told), versions=versions(), raw=told)
