"""Guests that run before memory and disks are there, and what happens when a process dies."""

import re
import signal
from pathlib import Path

import pytest

from tests.lab.bench import Bench, finish, first_line, until
from tests.lab.snapshots import SMALL, ids, proofs, taken

# Enough that somebody can die while it comes in.
LARGE = {**SMALL, "disk": "768MiB", "disk_format": "qcow2", "written": "300MiB"}


def behind(bench: Bench, name: str = "web1", on: str = "alpha") -> bool:
    """Whether something of the disk is still behind its image."""
    return "protocol='nbd'" in bench.inside(on, "virsh", "dumpxml", name)


def keeper(bench: Bench, on: str = "alpha") -> str | None:
    """Process number, on its host, of who serves."""
    told = bench.inside(on, "ss", "-xlpnH")
    lines = [line for line in told.splitlines() if "/run/vmckpt/lazy-" in line]
    match = re.search(r"pid=(\d+)", lines[0]) if lines else None
    return None if match is None else match[1]


def nothing_is_left(bench: Bench, on: str = "alpha") -> bool:
    """Whether no lazy restore has anything there; a protection before it leaves its directory."""
    return "lazy" not in bench.inside(on, "sh", "-c", "ls -A /run/vmckpt || true")


@pytest.mark.long
def test_a_guest_runs_before_its_disk_is_there(kept: Bench) -> None:
    kept.guest(**{**SMALL, "disk_format": "qcow2"})
    one = taken(kept).json
    back = kept.good("snapshot", "restore", one["id"], "--lazy", "--replace", "--json").json
    assert back["whole"]
    assert kept.where() == ["alpha"]
    assert not behind(kept)
    assert proofs(kept) == []
    assert nothing_is_left(kept)
    assert not kept.good("snapshot", "list", "--json").json[0]["pinned"]
    taken(kept)


def test_memory_comes_on_demand_and_a_raw_disk_is_written_first(kept: Bench) -> None:
    kept.guest(**SMALL)
    one = taken(kept).json
    back = kept.good("snapshot", "restore", one["id"], "--lazy", "--replace", "--json").json
    assert (back["whole"], back["warnings"]) == (True, [])
    assert kept.where() == ["alpha"]
    assert proofs(kept) == []
    assert nothing_is_left(kept)
    taken(kept)


SERVERS = "pgrep -f 'vmckpt[.]agent[.]main$'"
"""Prints the keeper's process number on its host; its command line ends with the module."""


@pytest.mark.parametrize(
    "who",
    [
        pytest.param("controller", marks=pytest.mark.long),
        pytest.param("agent, guard and keeper", marks=pytest.mark.long),
        "keeper",
    ],
)
def test_whoever_dies_the_memory_comes_in(kept: Bench, who: str) -> None:
    kept.guest(**{**SMALL, "memory": "768MiB", "dirty": "512MiB@1MiB/s"})
    one = taken(kept).json
    restoring = kept.start("snapshot", "restore", one["id"], "--lazy", "--replace")
    victims = f"$({SERVERS})"
    if "agent" in who:
        victims = f"$(pgrep -f keeper[_]guard) {victims} $(ps -o ppid= -p $({SERVERS}))"
    arrives = "until cat /run/vmckpt/lazy-*/memory.json 2>&-; do sleep 0.01; done"
    if who == "controller":
        kept.inside("alpha", "sh", "-c", arrives)
        restoring.kill()
    else:
        # The guest runs, and its memory is not complete.
        running = "until virsh domstate web1 | grep -q running; do sleep 0.01; done"
        kept.inside("alpha", "sh", "-c", f"{arrives}; {running}; kill -9 {victims}")
    done = finish(restoring)
    assert (done.code == 0) == (who == "keeper"), done.err
    if "guard" in who:
        assert "memory.json" in kept.inside("alpha", "sh", "-c", "ls /run/vmckpt/lazy-*")
    told = kept.good("recover", "--json").json
    assert [one["outcome"] for one in told] == ["completed"] * (who != "keeper"), told
    until(lambda: "running" in kept.inside("alpha", "virsh", "domstate", "web1"))
    assert proofs(kept) == []
    until(lambda: nothing_is_left(kept))


@pytest.mark.long
@pytest.mark.parametrize("who", ["controller", "agent, guard and keeper", "keeper"])
def test_whoever_dies_the_disk_comes_in(kept: Bench, who: str) -> None:
    kept.guest(**LARGE)
    one = taken(kept).json
    restoring = kept.start("snapshot", "restore", one["id"], "--lazy", "--replace")
    first_line(restoring, " disks: ")
    assert behind(kept)
    if who == "controller":
        restoring.kill()
    else:
        serving = keeper(kept)
        assert serving is not None
        parent = kept.inside("alpha", "ps", "-o", "ppid=", "-p", serving).strip()
        if who != "keeper":
            kept.inside("alpha", "pkill", "-9", "-f", "keeper[_]guard")
        for process in (parent, serving)[who == "keeper" :]:
            kept.inside("alpha", "kill", "-9", process)
    done = finish(restoring)
    assert (done.code == 0) == (who == "keeper"), done.err
    if who == "agent, guard and keeper":
        assert behind(kept)
        assert keeper(kept) is None
    told = kept.good("recover", "--json").json
    assert [one["outcome"] for one in told] == ["completed"] * (who != "keeper"), told
    assert kept.where() == ["alpha"]
    assert not behind(kept)
    until(lambda: "running" in kept.inside("alpha", "virsh", "domstate", "web1"))
    assert proofs(kept) == []
    assert nothing_is_left(kept)


@pytest.mark.long
def test_a_keeper_that_is_killed_is_replaced_by_its_guard(kept: Bench) -> None:
    """Even if the agent is gone, and nobody runs vmckpt recover."""
    kept.guest(**{**SMALL, "memory": "768MiB", "dirty": "512MiB@1MiB/s"})
    one = taken(kept).json
    restoring = kept.start("snapshot", "restore", one["id"], "--lazy", "--replace")
    arrives = "until cat /run/vmckpt/lazy-*/memory.json 2>&-; do sleep 0.01; done"
    running = "until virsh domstate web1 | grep -q running; do sleep 0.01; done"
    both = f"kill -9 $({SERVERS}) $(ps -o ppid= -p $({SERVERS}))"
    kept.inside("alpha", "sh", "-c", f"{arrives}; {running}; {both}")
    assert finish(restoring).code != 0
    until(lambda: "memory.json" not in kept.inside("alpha", "sh", "-c", "ls /run/vmckpt/*"))
    assert proofs(kept) == []
    assert [one["outcome"] for one in kept.good("recover", "--json").json] == ["completed"]
    until(lambda: nothing_is_left(kept))


@pytest.mark.long
def test_ctrl_c_leaves_a_guest_whose_disk_goes_on_coming_in(kept: Bench) -> None:
    kept.guest(**LARGE)
    one = taken(kept).json
    restoring = kept.start("snapshot", "restore", one["id"], "--lazy", "--replace")
    first_line(restoring, " disks: ")
    restoring.send_signal(signal.SIGINT)
    done = finish(restoring)
    assert (done.code, "are being copied in the background" in done.err) == (0, True), done.err
    until(lambda: not behind(kept), limit=60)
    until(lambda: nothing_is_left(kept))
    kept.good("recover")
    assert proofs(kept) == []


@pytest.mark.long
def test_a_guest_that_ends_meanwhile_has_a_whole_image(kept: Bench) -> None:
    guest = kept.guest(**LARGE)
    one = taken(kept).json
    restoring = kept.start("snapshot", "restore", one["id"], "--lazy", "--replace")
    first_line(restoring, " disks: ")
    kept.inside("alpha", "virsh", "destroy", "web1")
    done = finish(restoring)
    assert done.code == 0, done.err
    told = kept.inside("alpha", "qemu-img", "info", guest.disk_path)
    assert "backing file" not in told
    kept.inside("alpha", "qemu-img", "check", "-q", guest.disk_path)
    assert Path(guest.disk_path).stat().st_size > 250 << 20
    assert ids(kept) == [one["id"]]
