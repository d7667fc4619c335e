"""What docs/replication.md says of a protection in trouble, tried: each row of its table."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.bench import WHOLE, Bench, answers, finish, first_line, until, usable
from tests.lab.protecting import (
    GUEST,
    SOON,
    TTL,
    answered,
    asked,
    entry,
    epochs,
    lab_with_witness,
    left,
    ours,
    protect,
    say_logs,
    signalled,
    tidied,
)
from tests.support.paths import ROOT
from vmckpt.units import parse_rate
from vmckpt_lab import guests, network
from vmckpt_lab.faults import inject
from vmckpt_lab.faults.inject import SmallDisk
from vmckpt_lab.machine_speed import slowness
from vmckpt_lab.processes import Census
from vmckpt_lab.shell import in_namespace

pytestmark = pytest.mark.long

HOLD = 5.0
SETTLES = 4.0
"""What a machine with two cores may need beside what is promised."""
AGENT, GUARD, QEMU = (
    b"vmckpt.agent.replication.main",
    b"vmckpt.replication.watchdog.process",
    b"qemu-system",
)
FLOOD = 50_000
MEMORY = "/dev/shm/vmckpt-small"
SLOW = parse_rate("50mbit")


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"q{os.getpid()}") as made:
        yield made


@pytest.fixture
def pair(witnessed: Bench) -> Iterator[Bench]:
    with tidied(witnessed) as made:
        yield made
    for name in ("alpha", "beta"):
        network.shape(witnessed.plan, name, None)


def phase(bench: Bench, wanted: str) -> bool:
    return asked(bench).get("phase") == wanted


def silence(bench: Bench, since: float) -> float:
    """The longest that the guest was not heard for, from then on."""
    return bench.seen(since=since, until=time.monotonic()).blackout


def heard(bench: Bench, since: float) -> bool:
    return (bench.seen().answered_at or 0) > since


# --- a slow link ------------------------------------------------------------------------------


def test_over_a_slow_link_epochs_come_later_and_the_status_says_why(pair: Bench) -> None:
    pair.guest(**(GUEST | {"memory": "256MiB", "dirty": "64MiB@90MiB/s"}))
    protect(pair)
    epochs(pair, 8)
    before = asked(pair)
    network.shape(pair.plan, "beta", SLOW)
    slowed = time.monotonic()
    until(lambda: asked(pair).get("interval_s", 0) > 2 * before["interval_s"], limit=SOON)
    slow = []
    for _ in range(6):
        time.sleep(1.0)  # looks at several epochs, of a second or more each
        # Two clocks, two agents: neither may be much more hopeful than the other.
        age = asked(pair, "beta")["epoch_age_s"]
        slow.append(asked(pair))
        assert slow[-1]["rpo_worst_s"] > 0.8 * age, (slow[-1], age)
    found = answered(pair, "alpha", "beta")
    assert (found["says"]["alpha"]["phase"], found["standby"]["ready"]) == ("protecting", True)
    sys.stderr.write(f"{[(one['interval_s'], one['rpo_s'], one['interval_why']) for one in slow]}")
    assert "took" in slow[-1]["interval_why"]
    assert slow[-1]["rpo_worst_s"] > slow[-1]["interval_s"] / 1.2
    assert slow[-1]["output_delay_s"] > before["output_delay_s"]
    assert slow[-1]["epoch"] > slow[0]["epoch"]
    assert heard(pair, slowed + 5.0)
    network.shape(pair.plan, "beta", None)
    until(lambda: asked(pair).get("interval_s", 9) < 1.3 * before["interval_s"], limit=SOON)
    assert pair.where() == ["alpha"]
    assert pair.ledgers() == WHOLE


# --- no room on the backup --------------------------------------------------------------------


@contextmanager
def small(bench: Bench, folder: str, *, mib: int) -> Iterator[SmallDisk]:
    """A file system of its own over a folder of the backup, as long as the guest is protected."""
    bench.inside("beta", "mkdir", "-p", folder)
    disk = SmallDisk(Path(folder), mib=mib, plan=bench.plan, name="beta")
    disk.mount()
    try:
        yield disk
    finally:
        say_logs(bench)
        disk.free()
        bench.run("unprotect", "web1")
        disk.unmount()


def fill_tmpfs(bench: Bench, disk: SmallDisk) -> None:
    del bench
    disk.fill()


def fill_disk(bench: Bench, disk: SmallDisk) -> None:
    """Also what the log has already is taken: a file system that never writes in place asks for
    room for every epoch, too."""
    (log,) = disk.seen.glob("replica-*/writes")
    signalled(bench, "beta", AGENT, signal.SIGSTOP)
    subprocess.run(["fallocate", "-p", "-o", "4096", "-l", "64MiB", str(log)], check=True)
    disk.fill()
    signalled(bench, "beta", AGENT, signal.SIGCONT)


@pytest.mark.parametrize("what", [pytest.param("tmpfs", marks=pytest.mark.campaign), "disk"])
def test_a_backup_without_room_is_gone_on_without_until_there_is_some(
    pair: Bench, what: str
) -> None:
    folder = MEMORY if what == "tmpfs" else f"{pair.plan.host('beta').root}/agent"
    if what == "tmpfs":
        made = f"mkdir -p -m 711 /run/vmckpt && ln -sfn {MEMORY} /run/vmckpt/memory"
        pair.inside("beta", "sh", "-c", made)
    with small(pair, folder, mib=1024 if what == "tmpfs" else 64) as disk:
        pair.guest(**GUEST)
        protect(pair)
        epochs(pair)
        began = time.monotonic()
        (fill_tmpfs if what == "tmpfs" else fill_disk)(pair, disk)
        until(lambda: phase(pair, "alone"), limit=SOON)
        until(lambda: "No space left" in asked(pair).get("says", ""), limit=SOON)
        found = answered(pair, "alpha", "beta")
        assert "No space left on device" in found["says"]["alpha"]["says"]
        assert "free some space" in found["says"]["alpha"]["says"]
        assert found["standby"] == {
            "ready": False,
            "why": "the guest is running unprotected, so its standby is outdated",
        }  # fmt: skip
        assert "No space left" in pair.good("status", "web1").out
        # It is tried again and again, which nobody outside is to notice for five seconds.
        tried = time.monotonic()
        time.sleep(6.0)
        assert silence(pair, began) < HOLD + SETTLES * slowness()
        assert silence(pair, tried + 1.0) < 2.0 * slowness()
        disk.free()
        until(lambda: phase(pair, "protecting"), limit=90.0)
        until(lambda: bool(asked(pair, "beta").get("ready")), limit=SOON)
        assert pair.where() == ["alpha"]
        assert pair.ledgers() == WHOLE


# --- the lease store --------------------------------------------------------------------------


def test_without_the_lease_store_the_guest_ends_with_its_lease_and_runs_once_it_is_back(
    pair: Bench,
) -> None:
    pair.guest(**GUEST)
    protect(pair)
    epochs(pair)
    stopped = time.monotonic()
    command = inject.stop_postgres(pair.plan)
    try:
        until(lambda: inject.qemu(pair.plan, "web1", "alpha") is None, limit=SOON)
        gone = time.monotonic()
        lasted = gone - stopped
        # A lease, less a fifth, from when the last renewal was sent.
        assert 0.375 * TTL < lasted < 0.8 * TTL + SETTLES * slowness()
        waits = inject.qemu(pair.plan, "web1", "beta")
        assert waits is not None
        census = Census(pair.plan)
        before = census.ran(waits)
        time.sleep(TTL + 2.0)  # nothing may run, though the lease is over
        assert census.ran(waits) == before
        found = answered(pair, "alpha", "beta")
        assert found["says"]["alpha"]["outcome"] == "died"
        assert "killed the guest: the lease has ended" in found["says"]["alpha"]["why"]
        assert not heard(pair, gone)
    finally:
        inject.start_postgres(pair.plan, command)
    back = time.monotonic()
    until(lambda: heard(pair, back), limit=SOON)
    took = time.monotonic() - back
    sys.stderr.write(f"ended after {lasted:.2f} s, runs {took:.2f} s after the store is back\n")
    # Nobody knows who renewed it meanwhile.
    assert took > 0.75 * TTL
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE


@pytest.mark.campaign
def test_a_lease_store_that_is_away_for_less_than_a_lease_is_not_noticed(pair: Bench) -> None:
    pair.guest(**GUEST)
    # To stop and start a database takes seconds, too, on a busy machine.
    protect(pair, "--ttl", "20s")
    epochs(pair)
    before, began = ours(pair), time.monotonic()
    command = inject.stop_postgres(pair.plan)
    time.sleep(2.0)
    inject.start_postgres(pair.plan, command)
    time.sleep(24.0)  # longer than a lease: nothing comes of it
    found = answered(pair, "alpha", "beta")
    assert found["says"]["alpha"]["phase"] == "protecting"
    assert found["says"]["alpha"]["epoch"] > before["epoch"] + 20
    assert found["standby"]["ready"]
    assert pair.where() == ["alpha"]
    assert silence(pair, began) < 2.0 * slowness()
    assert pair.ledgers() == WHOLE


# --- packets ----------------------------------------------------------------------------------


@contextmanager
def flood(bench: Bench, rate: int, seconds: float) -> Iterator[None]:
    """The guest's kernel is asked for so many answers a second."""
    address = guests.find(bench.plan, "web1").address
    words = [sys.executable, "-m", "tests.lab.flooding", address, str(rate), str(seconds)]
    command = in_namespace(bench.plan.observer_namespace, *words)
    with subprocess.Popen(command, cwd=ROOT) as running:
        yield
        until(lambda: running.poll() is not None, limit=60.0)


def lost_in_an_epoch_that_cannot_end(bench: Bench, rate: int) -> bool:
    """Whether packets were lost while the backup took nothing, and the guest was flooded."""
    with flood(bench, rate, 4.5):
        signalled(bench, "beta", GUARD, signal.SIGSTOP)
        signalled(bench, "beta", AGENT, signal.SIGSTOP)
        time.sleep(4.0)  # after HOLD the guest would go on alone, and its output would leave
        signalled(bench, "beta", AGENT, signal.SIGCONT)
        signalled(bench, "beta", GUARD, signal.SIGCONT)
    before = ours(bench)
    until(lambda: asked(bench).get("epoch", 0) > before["epoch"] + 1, limit=SOON)
    return bool(ours(bench)["packets_lost"])


def test_a_flood_ends_epochs_early_and_what_is_too_much_is_lost_and_told(pair: Bench) -> None:
    pair.guest(**(GUEST | {"dirty": "8MiB@1MiB/s"}))
    protect(pair, "--interval", "5s")
    epochs(pair, 1)
    before = ours(pair)
    with flood(pair, 8000, 10.0):
        time.sleep(9.0)  # two epochs at the most, if none ended early
        found = ours(pair)
    made = found["epoch"] - before["epoch"]
    sys.stderr.write(f"{made} epochs; last {found['last']}; lost {found['packets_lost']}\n")
    # The guest answers thousands a second: an epoch of 5 s would have too many.
    assert made > 2
    assert found["packets_lost"] == 0
    # Without a core for itself it answers fewer the more it is asked.
    lost = any(lost_in_an_epoch_that_cannot_end(pair, rate) for rate in (20_000, 8000, 8000, 5000))
    found = ours(pair)
    assert lost
    sys.stderr.write(f"lost {found['packets_lost']}\n")
    assert " lost: QEMU's buffer was full" in pair.good("status", "web1").out
    until(lambda: asked(pair).get("epoch", 0) > found["epoch"] + 1, limit=SOON)
    assert phase(pair, "protecting")
    assert pair.where() == ["alpha"]
    assert pair.ledgers() == WHOLE


# --- a backup that crashes --------------------------------------------------------------------


def test_a_backup_that_crashes_is_gone_on_without_and_told_of(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    epochs(pair)
    began = time.monotonic()
    for word in (GUARD, AGENT, QEMU):
        signalled(pair, "beta", word, signal.SIGKILL)
    until(lambda: phase(pair, "alone"), limit=SOON)
    found = answered(pair, "alpha", "beta")
    assert not found["standby"]["ready"]
    answers(pair)
    assert silence(pair, began) < HOLD + SETTLES * slowness()
    assert pair.where() == ["alpha"]
    # `jobs` waits 8 s for the answers of agents, which a machine with three labs may need.
    until(lambda: "alone" in pair.good("jobs").out, limit=3 * SOON)
    pair.good("unprotect", "web1")
    assert left(pair) == []
    assert protect(pair)["status"]["phase"] == "protecting"
    assert pair.ledgers() == WHOLE


# --- watched ----------------------------------------------------------------------------------


def test_a_watched_protection_tells_what_happens_to_it_until_it_ends(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair, automatic=False)
    epochs(pair)
    watch = pair.start("watch", "web1")
    began = time.monotonic()
    lines = first_line(watch, "protecting, epoch")
    network.cut(pair.plan, "beta")
    lines += first_line(watch, " alone, ")
    network.heal(pair.plan, "beta")
    lines += first_line(watch, "protecting, epoch")
    epochs(pair)
    pair.good("failover", "web1", "--planned")
    done = finish(watch, limit=30.0)
    err = "".join(lines) + done.err
    assert done.code == 0, err
    assert "the guest is running on beta" in done.out
    # One each ten seconds, and one for each of the few changes.
    assert len(err.splitlines()) < 20 + (time.monotonic() - began) / 10, err


# --- the guest is reset -----------------------------------------------------------------------


def test_a_guest_that_is_reset_stays_protected(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    epochs(pair)
    first = ours(pair)
    pair.inside("alpha", "virsh", "-q", "set-lifecycle-action", "web1", "reboot", "restart")
    pair.inside("alpha", "virsh", "-q", "reset", "web1")
    until(lambda: pair.seen().runs == 2, limit=SOON)
    epochs(pair)
    found = ours(pair)
    assert (found["phase"], found["process"]) == ("protecting", first["process"])
    assert entry(pair)["standby"]["ready"]
    pair.good("failover", "web1", "--planned")
    assert pair.where() == ["beta"]
    found = pair.ledgers()  # its output has begun anew
    assert (found["memory"], found["disk"]) == (True, True)
    assert left(pair) == []


# --- many epochs ------------------------------------------------------------------------------


@pytest.mark.campaign
def test_two_thousand_epochs_back_to_back_never_trip_qemu(pair: Bench) -> None:
    pair.guest(memory="128MiB", dirty="8MiB@2MiB/s", disk="16MiB", shared_memory=True)
    protect(pair, "--interval", "20ms")
    first, began = ours(pair), time.monotonic()
    until(lambda: asked(pair).get("epoch", 0) - first["epoch"] >= 2000, limit=400.0)
    took = time.monotonic() - began
    found = ours(pair)
    count = found["epoch"] - first["epoch"]
    sys.stderr.write(f"{count} epochs in {took:.0f} s, {found['median']}\n")
    assert found["phase"] == "protecting"
    # No agent was started again meanwhile.
    assert found["process"] == first["process"]
    pair.good("unprotect", "web1")
    usable(pair)
