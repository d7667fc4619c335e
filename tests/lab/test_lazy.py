"""Guests that run before their disks are there, and what becomes of them when somebody dies."""

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


@pytest.mark.long
def test_a_raw_disk_is_refused_and_the_guest_runs_on(kept: Bench) -> None:
    kept.guest(**SMALL)
    one = taken(kept).json
    done = kept.run("snapshot", "restore", one["id"], "--lazy", "--replace")
    assert (done.code, "only qcow2 images can be filled" in done.err) == (2, True)
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}
    until(lambda: nothing_is_left(kept))


@pytest.mark.long
@pytest.mark.parametrize("who", ["controller", "agent and keeper", "keeper"])
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
        for process in (parent, serving)[who == "keeper" :]:
            kept.inside("alpha", "kill", "-9", process)
    done = finish(restoring)
    assert (done.code == 0) == (who == "keeper"), done.err
    if who == "agent and keeper":
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
