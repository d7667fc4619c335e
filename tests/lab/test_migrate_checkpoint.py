"""Guests moved by epochs on real hosts: busy ones, with shared and copied disks, interrupted."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.lab.bench import WHOLE, Bench, Done, codes, first_line, until
from tests.lab.bench import finish as finish_soon
from tests.lab.protecting import agent, left, on_qemu, stored
from vmckpt.units import parse_rate
from vmckpt_lab import network
from vmckpt_lab.guests import LabGuest
from vmckpt_lab.machine_speed import slowness

pytestmark = pytest.mark.long

GUEST: dict[str, Any] = {
    "memory": "128MiB", "dirty": "16MiB@5MiB/s", "disk": "8MiB",
}  # fmt: skip
# Rewrites its region faster than the link carries, so pre-copy never ends; an eighth of each page.
BUSY: dict[str, Any] = {**GUEST, "dirty": "32MiB@40MiB/s"}
SLOW = parse_rate("100mbit")
CHECKPOINT = ("--mode", "checkpoint", "--max-downtime", "1s", "--timeout", "4m")
SOON = 60.0
# Each order starts a program on a host: on a busy machine that takes seconds.
PATIENCE = 280.0


@pytest.fixture
def pair(bench: Bench) -> Iterator[Bench]:
    """A lab; afterwards nothing of a move is left, whatever became of it."""
    yield bench
    for one in bench.plan.hosts:
        network.heal(bench.plan, one.name)
        network.shape(bench.plan, one.name, None)
    bench.run("cancel", "web1")  # of a test that failed before its command ended
    bench.run("recover")
    until(lambda: left(bench) == [], limit=SOON)


def finish(process: "subprocess.Popen[str]") -> Done:
    return finish_soon(process, limit=PATIENCE)


def migrate(bench: Bench, to: str, *more: str) -> Done:
    return finish(bench.start("migrate", "web1", "--to", to, "--json", *more))


def slow(bench: Bench) -> None:
    for one in bench.plan.hosts:
        network.shape(bench.plan, one.name, SLOW)


def is_whole(bench: Bench, host: str) -> None:
    """The guest runs there as an ordinary one, and nothing of its move is on either host."""
    other = {"alpha": "beta", "beta": "alpha"}[host]
    assert bench.where() == [host]
    assert left(bench) == []
    assert on_qemu(bench, host) == []
    assert bench.inside(other, "virsh", "list", "--all", "--name").split() == []
    heard = bench.seen().heard
    until(lambda: bench.seen().heard > heard + 5, limit=SOON)
    assert bench.ledgers() == WHOLE


def test_a_guest_that_pre_copy_never_ends_with_goes_over_and_comes_back(pair: Bench) -> None:
    pair.guest(**BUSY)
    pair.inside("alpha", "virsh", "autostart", "web1")
    slow(pair)
    never = migrate(pair, "beta", "--mode", "precopy", "--timeout", "12s", "--probe", "off")
    assert never.json["outcome"] in ("timed-out", "not-converged"), never.err

    done = migrate(pair, "beta", *CHECKPOINT)
    assert done.code == 0, done.err
    told = done.json
    assert (told["outcome"], told["mode"], told["driver"]) == (
        "completed", "checkpoint", "by agents",
    )  # fmt: skip
    assert 0 < told["downtime_ms"] < 1500 * slowness()
    assert told["observed_downtime_ms"] < 2500 * slowness()
    assert [one["rule"] for one in told["decisions"]] == ["caught up"]
    is_whole(pair, "beta")
    assert stored(pair, "beta") == ["web1"]
    assert "enable" in pair.inside("beta", "virsh", "dominfo", "web1").split("Autostart:")[1]

    for one in pair.plan.hosts:
        network.shape(pair.plan, one.name, None)
    back = migrate(pair, "alpha", "--mode", "precopy", "--timeout", "90s")
    assert back.code == 0, back.err
    assert pair.ledgers() == WHOLE
    assert stored(pair, "alpha") == ["web1"]


def test_a_large_guest_goes_over_without_preparation(pair: Bench) -> None:
    """Comparison was limited to 2 GiB of shared memory; write tracking is not."""
    pair.guest(**{**GUEST, "memory": "2560MiB"})
    assert "memoryBacking" not in pair.inside("alpha", "virsh", "dumpxml", "web1")
    done = migrate(pair, "beta", *CHECKPOINT)
    assert done.code == 0, done.err
    assert (done.json["outcome"], done.json["mode"]) == ("completed", "checkpoint")
    assert 0 < done.json["downtime_ms"] < 1500 * slowness()
    is_whole(pair, "beta")


@pytest.mark.campaign
@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_a_disk_that_both_hosts_see_stays_where_it_is(pair: Bench, form: str) -> None:
    guest = pair.guest(**GUEST, disk_format=form)
    done = migrate(pair, "beta", *CHECKPOINT)
    assert done.code == 0, done.err
    assert done.json["left_behind"] == []
    is_whole(pair, "beta")
    assert disk(pair, "beta", guest) == guest.disk_path
    # QEMU there has it for itself: nobody else may write to it.
    write = f"qemu-io -f {form} -c 'write 0 512' {guest.disk_path} 2>&1 || true"
    for host in ("alpha", "beta"):
        assert 'Failed to get "write" lock' in pair.inside(host, "sh", "-c", write)
    again = migrate(pair, "alpha", *CHECKPOINT)
    assert again.code == 0, again.err
    is_whole(pair, "alpha")


def disk(bench: Bench, host: str, guest: LabGuest) -> str:
    """Where the guest's disk is, as its host's libvirt says."""
    listed = bench.inside(host, "virsh", "domblklist", guest.name)
    return next(line.split()[1] for line in listed.splitlines() if line.split()[:1] == ["vda"])


def test_a_disk_of_its_own_goes_along(pair: Bench) -> None:
    guest = pair.guest(**GUEST, private_disk=True, disk_format="qcow2")
    refused = migrate(pair, "beta", *CHECKPOINT)
    assert "storage-not-visible" in codes(refused)
    done = migrate(pair, "beta", *CHECKPOINT, "--copy-storage", "thin")
    assert done.code == 0, done.err
    assert done.json["left_behind"] == [guest.disk_path]
    is_whole(pair, "beta")


@pytest.mark.campaign
def test_a_guest_that_is_stored_nowhere_stays_so(pair: Bench) -> None:
    pair.guest(**GUEST)
    pair.inside("alpha", "virsh", "undefine", "web1")
    done = migrate(pair, "beta", *CHECKPOINT)
    assert done.code == 0, done.err
    is_whole(pair, "beta")
    assert stored(pair, "beta") == []


def test_what_is_against_it_is_said_before_anything_is_changed(pair: Bench) -> None:
    pair.guest(**GUEST)
    strict = pair.plan.folder / "strict.yaml"
    strict.write_text(
        "version: vmckpt/v1\nname: strict\nmode: checkpoint\nlimits: {max_downtime: 5ms}\n"
    )
    refused = migrate(pair, "beta", "--policy", str(strict))
    assert codes(refused) == ["pause-long"]
    (found,) = [one for one in refused.json["findings"] if one["severity"] == "blocker"]
    assert "allow a longer pause" in found["hint"]
    planned = pair.run("plan", "web1", "--to", "beta", "--policy", str(strict), "--json")
    assert planned.json["forecasts"] == []
    assert not planned.json["possible"]
    assert pair.where() == ["alpha"]
    assert left(pair) == []


def test_dry_it_is_only_looked_at(pair: Bench) -> None:
    pair.guest(**GUEST)
    planned = pair.good("plan", "web1", "--to", "beta", "--policy", "busy", "--json").json
    assert (planned["mode"], planned["forecasts"]) == ("checkpoint", [])
    assert "epochs until the last epoch is expected to take at most 500 ms" in planned["reason"]
    pair.good("migrate", "web1", "--to", "beta", "--policy", "busy", "--dry-run")
    pair.good("migrate", "web1", "--to", "beta", "--mode", "checkpoint", "--dry-run")
    assert left(pair) == []
    assert pair.where() == ["alpha"]


def test_stopped_by_ctrl_c_the_guest_runs_on_where_it_was(pair: Bench) -> None:
    pair.guest(**BUSY)
    slow(pair)
    for word in ("phase=pre-copy", "iteration=2"):
        moving = pair.start("migrate", "web1", "--to", "beta", "--json", *NEVER)
        first_line(moving, word)
        moving.send_signal(signal.SIGINT)
        done = finish(moving)
        assert done.code == 130, done.err
        is_whole(pair, "alpha")
        assert stored(pair, "alpha") == ["web1"]


# Device state alone takes longer.
NEVER = ("--mode", "checkpoint", "--max-downtime", "60ms", "--timeout", "4m")


@pytest.mark.campaign
def test_at_the_time_limit_it_stays(pair: Bench) -> None:
    pair.guest(**GUEST)
    done = migrate(
        pair, "beta", "--mode", "checkpoint", "--max-downtime", "60ms", "--timeout", "12s"
    )
    assert done.json["outcome"] == "timed-out"
    assert "a switchover would take" in done.json["error"]
    is_whole(pair, "alpha")


@pytest.mark.parametrize(
    "word",
    [
        pytest.param("phase=setup", marks=pytest.mark.campaign), "phase=pre-copy",
        pytest.param("iteration=2", marks=pytest.mark.campaign),
    ],
)  # fmt: skip
def test_a_controller_that_is_killed_leaves_a_guest_that_recover_lets_stay(
    pair: Bench, word: str
) -> None:
    pair.guest(**GUEST)
    moving = pair.start("migrate", "web1", "--to", "beta", "--json", *NEVER)
    first_line(moving, word)
    time.sleep(0.5)  # into the middle of it
    moving.kill()
    finish(moving)
    refused = pair.run("failover", "web1", "--host-is-off")
    assert refused.code != 0
    assert "is not protected" in refused.err
    assert pair.run("cancel", "web1").code != 0

    done = pair.good("recover", "--json").json
    assert [one["outcome"] for one in done] == ["failed"]
    is_whole(pair, "alpha")
    assert stored(pair, "alpha") == ["web1"]
    assert pair.good("jobs", "--json").json == []


@pytest.mark.parametrize(
    "wait", [0.1, *(pytest.param(one, marks=pytest.mark.campaign) for one in (0.0, 0.3, 1.0))]
)
def test_a_controller_that_is_killed_in_the_switch_leaves_one_guest(
    pair: Bench, wait: float
) -> None:
    pair.guest(**GUEST)
    moving = pair.start("migrate", "web1", "--to", "beta", "--json", *CHECKPOINT)
    first_line(moving, "decided action=switch")
    time.sleep(wait)
    moving.kill()
    finish(moving)
    pair.good("recover")
    (host,) = pair.where()
    is_whole(pair, host)
    assert stored(pair, host) == ["web1"]


@pytest.mark.campaign
def test_agents_that_are_killed_are_started_again_and_it_goes_on(pair: Bench) -> None:
    pair.guest(**GUEST)
    moving = pair.start("migrate", "web1", "--to", "beta", "--json", *NEVER)
    first_line(moving, "iteration=2")
    for name in ("alpha", "beta"):
        killed = agent(pair, name)
        os.kill(killed, signal.SIGKILL)
        until(lambda: _another_agent(pair, name, killed), limit=SOON)  # noqa: B023
    pair.good("set", "web1", "--max-downtime", "1s")
    done = finish(moving)
    assert done.code == 0, done.err
    is_whole(pair, "beta")


def _another_agent(bench: Bench, name: str, before: int) -> bool:
    """Whether a host has an agent in place of the one before."""
    with suppress(ValueError):  # there is none just now
        return agent(bench, name) != before
    return False


@pytest.mark.campaign
def test_a_link_that_breaks_for_a_while_only_delays_it(pair: Bench) -> None:
    pair.guest(**GUEST)
    moving = pair.start("migrate", "web1", "--to", "beta", "--json", *NEVER)
    first_line(moving, "iteration=2")
    network.cut(pair.plan, "beta")
    time.sleep(8.0)  # for as long as it is cut
    network.heal(pair.plan, "beta")
    pair.good("set", "web1", "--max-downtime", "1s")
    done = finish(moving)
    assert done.code == 0, done.err
    is_whole(pair, "beta")


def test_a_guest_on_its_way_is_nobody_else_s(pair: Bench) -> None:
    pair.guest(**GUEST)
    moving = pair.start("migrate", "web1", "--to", "beta", "--json", *NEVER)
    first_line(moving, "iteration=2")
    try:
        assert pair.run("protect", "web1", "--to", "beta", "--failover", "manual").code != 0
        # Its standby may be told of before its lease: then it is blocked.
        assert pair.run("migrate", "web1", "--to", "beta", "--mode", "precopy").code in (18, 21)
        listed = {one["host"]: one["state"] for one in pair.good("guests", "--json").json}
        # In an epoch's pause it is paused.
        assert (listed["alpha"] in ("running", "paused"), listed["beta"]) == (True, "standby")
        assert pair.good("status", "--json").json == []
        refused = pair.run("pause", "web1")
        assert refused.code != 0
        assert "not available in mode checkpoint" in refused.out + refused.err
    finally:
        pair.run("cancel", "web1")
        done = finish(moving)
    assert done.code == 130, done.err
    is_whole(pair, "alpha")
