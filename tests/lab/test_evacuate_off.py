"""Guests that are off leave with disks that the new host does not see, on real hosts."""

import hashlib
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError, Popen
from typing import Any

import pytest

from tests.lab.bench import WHOLE, Bench, finish, first_line, until
from tests.lab.firmware import NVRAM, with_nvram
from vmckpt.units import parse_rate
from vmckpt_lab import network

OWN: dict[str, Any] = {
    "memory": "128MiB", "dirty": "8MiB@1MiB/s", "disk": "96MiB", "written": "40MiB",
    "private_disk": True,
}  # fmt: skip
POLICY = "version: vmckpt/v1\nname: carried\nstorage: {copy: thin}\nevacuate: {first_wait: 1s}\n"


@pytest.fixture
def policy(bench: Bench) -> Iterator[str]:
    """A policy that copies disks; afterwards no host is in maintenance."""
    file = bench.plan.folder / "carried.yaml"
    file.write_text(POLICY)
    yield str(file)
    network.shape(bench.plan, "alpha", None)
    file.unlink()
    for name in ("alpha", "beta"):
        line = f"virsh destroy web1; virsh undefine --nvram web1; rm -f {NVRAM}"
        bench.inside(name, "sh", "-c", f"{{ {line}; }} 2>/dev/null")
    for one in bench.good("maintenance", "list", "--json").json:
        bench.good("maintenance", "leave", one["host"])


def image(bench: Bench, host: str) -> Path:
    """Where a host's own image of web1 is, as this machine sees it."""
    return bench.plan.host(host).root / "private" / "web1.raw"


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def off(bench: Bench) -> str:
    """A guest that has written, and was shut down; what its disk holds."""
    bench.guest("web1", **OWN)
    until(lambda: bench.seen().highest > 3)
    bench.inside("alpha", "virsh", "destroy", "web1")
    return digest(image(bench, "alpha"))


def half_way(bench: Bench, policy: str) -> Popen[str]:
    """An evacuation over a slow line that has copied a part of the disk."""
    network.shape(bench.plan, "alpha", parse_rate("50mbit"))
    running = bench.start("evacuate", "alpha", "--policy", policy, "--yes", "--json")
    parts = image(bench, "beta").parent

    def copied() -> bool:
        assert running.poll() is None, finish(running)
        return any(one.stat().st_blocks > 8192 for one in parts.glob("*.vmckpt-*"))

    until(copied, limit=60.0)
    return running


def test_its_disk_and_its_firmware_go_with_it(bench: Bench, policy: str) -> None:
    """Refused without a policy that copies; with it the images are the same there, holes as well,
    and the guest starts."""
    bench.guest("web1", **OWN)
    with_nvram(bench)
    bench.inside("alpha", "virsh", "destroy", "web1")
    written = digest(image(bench, "alpha"))
    refused = bench.run("evacuate", "alpha", "--dry-run", "--json")
    assert refused.code == 21, refused.err
    plan = bench.good("evacuate", "alpha", "--policy", policy, "--dry-run", "--json").json
    assert [(one["to"], one["mode"]) for one in plan["moves"]] == [("beta", "offline")]
    done = bench.good("evacuate", "alpha", "--policy", policy, "--yes", "--json").json
    assert [one["guest"] for one in done["moved"]] == ["web1"], done
    assert digest(image(bench, "beta")) == written
    here, there = image(bench, "alpha").stat(), image(bench, "beta").stat()
    assert there.st_blocks <= here.st_blocks * 1.1
    assert bench.inside("beta", "sha256sum", NVRAM) == bench.inside("alpha", "sha256sum", NVRAM)
    assert not list(image(bench, "beta").parent.glob("*.vmckpt-*"))
    bench.inside("beta", "virsh", "start", "web1")
    before = bench.seen().highest
    until(lambda: bench.seen().highest > before)
    # Its way back is barred by the image that it left behind, and that is said.
    back = bench.run("repopulate", "alpha", "--policy", policy, "--yes", "--json")
    assert back.code != 0
    assert "web1.raw already exists" in back.err + back.out


def test_where_images_are_removed_behind_it_a_guest_comes_back(bench: Bench, policy: str) -> None:
    """It leaves while it runs, and comes back while it is off, with its firmware's variables."""
    Path(policy).write_text(POLICY.replace("thin}", "thin, left_behind: remove}"))
    bench.guest("web1", **OWN)
    with_nvram(bench)
    firmware = bench.inside("alpha", "sha256sum", NVRAM)
    ran = bench.good("evacuate", "alpha", "--policy", policy, "--yes", "--json")
    done = ran.json
    assert "still on" not in ran.err
    assert [one["guest"] for one in done["moved"]] == ["web1"], done
    assert not image(bench, "alpha").exists()
    assert {**bench.ledgers(), "output": True} == WHOLE  # it was started anew for its firmware
    assert bench.inside("beta", "sha256sum", NVRAM) == firmware
    bench.inside("beta", "virsh", "destroy", "web1")
    written = digest(image(bench, "beta"))
    back = bench.good("repopulate", "alpha", "--policy", policy, "--yes", "--json").json
    assert [one["guest"] for one in back["moved"]] == ["web1"], back
    assert digest(image(bench, "alpha")) == written
    assert not list(image(bench, "beta").parent.iterdir())
    assert bench.inside("alpha", "sha256sum", NVRAM) == firmware
    before = bench.seen().highest
    bench.inside("alpha", "virsh", "start", "web1")
    until(lambda: bench.seen().highest > before)
    moved = bench.good("migrate", "web1", "--to", "beta", "--policy", policy, "--json").json
    assert (moved["left_behind"], len(moved["removed"])) == ([], 2)


@pytest.mark.long
def test_a_killed_controller_is_gone_on_with(bench: Bench, policy: str) -> None:
    """What the first one had copied is thrown away, and all of it is there in the end."""
    written = off(bench)
    parts = image(bench, "beta").parent
    running = half_way(bench, policy)
    running.send_signal(signal.SIGKILL)
    finish(running)
    network.shape(bench.plan, "alpha", None)
    told = bench.run("migrate", "web1", "--to", "beta").err  # recovers what was interrupted first
    (next_step,) = [one for one in told.splitlines() if "to continue it" in one]
    bench.follow(next_step)
    assert digest(image(bench, "beta")) == written
    assert [one.name for one in parts.iterdir()] == ["web1.raw"]
    assert "web1" in bench.inside("beta", "virsh", "list", "--all", "--name")
    assert "web1" not in bench.inside("alpha", "virsh", "list", "--all", "--name")


@pytest.mark.long
def test_stopped_in_the_middle_it_is_where_it_was(bench: Bench, policy: str) -> None:
    """Ctrl-C lets it arrive, a second one does not: then nothing of it is there."""
    written = off(bench)
    parts = image(bench, "beta").parent
    running = half_way(bench, policy)
    # Nobody writes to what is read.
    with pytest.raises(CalledProcessError):
        bench.inside("alpha", "virsh", "start", "web1")
    running.send_signal(signal.SIGINT)
    first_line(running, "stopping")
    running.send_signal(signal.SIGINT)
    done = finish(running)
    assert done.code == 26, done.err
    assert list(parts.iterdir()) == []
    assert digest(image(bench, "alpha")) == written
    before = bench.seen().highest
    bench.inside("alpha", "virsh", "start", "web1")
    until(lambda: bench.seen().highest > before)
