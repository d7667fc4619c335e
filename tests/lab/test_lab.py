"""The lab itself: it must be real, tell the truth, and leave nothing."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.bench import VMCKPT, WHOLE, Bench, code_of, first_line, traces, until
from vmckpt.units import parse_rate
from vmckpt_lab import guests, lab, network


def vmckpt(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*VMCKPT, *args], capture_output=True, text=True, check=False)


@pytest.fixture
def name() -> str:
    return f"x{os.getpid()}"


def test_up_twice_is_up_once_and_down_leaves_nothing(name: str) -> None:
    try:
        assert vmckpt("lab", "up", "--name", name).returncode == 0
        again = vmckpt("lab", "up", "--name", name)
        assert again.returncode == 0
        assert "is already running" in again.stderr
        other = vmckpt("lab", "up", "--name", name, "--hosts", "3")
        assert other.returncode == 2
        assert f"run vmckpt lab down --name {name} first" in other.stderr
        assert len(traces(name)) > 5
    finally:
        assert vmckpt("lab", "down", "--name", name).returncode == 0
    assert traces(name) == []
    assert vmckpt("lab", "down", "--name", name).returncode == 0


@pytest.mark.parametrize(
    "there",
    [pytest.param(1, marks=pytest.mark.long), 5, pytest.param(8, marks=pytest.mark.long)],
)
def test_what_a_killed_up_leaves_is_removed_by_the_next(name: str, there: int) -> None:
    """It is killed when that much of the lab is there."""
    broken = subprocess.Popen([*VMCKPT, "lab", "up", "--name", name], stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(traces(name)) >= there)
        broken.kill()
        broken.wait()
        made = lab.up(name)
        assert Bench(made).run("hosts").code == 0
    finally:
        lab.down(name)
    assert traces(name) == []


def test_a_lab_is_locked_until_the_last_command_of_a_killed_up_has_ended(
    name: str, tmp_path: Path
) -> None:
    """Else that command makes a namespace where the next `up` has just looked for one."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    slow = ["sh", "-c", f"touch {begun}; sleep 1; touch {ended}"]
    program = f"from vmckpt_lab import lab, shell\nwith lab.locked({name!r}): shell.run({slow})"
    with subprocess.Popen([sys.executable, "-c", program]) as killed:
        until(begun.exists)
        killed.kill()

    with lab.locked(name):
        assert ended.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_up_that_is_stopped_cleans_up(name: str, number: signal.Signals) -> None:
    stopped = subprocess.Popen(
        [*VMCKPT, "lab", "up", "--name", name], stderr=subprocess.PIPE, text=True
    )
    first_line(stopped, "network")
    until(lambda: bool(network.namespaces(f"vmckpt.{name}.")))
    stopped.send_signal(number)

    assert code_of(stopped) == 130
    assert traces(name) == []
    assert stopped.stderr is not None
    assert "Traceback" not in stopped.stderr.read()
    stopped.stderr.close()


def test_a_witness_answers_every_host_and_is_part_of_none(name: str) -> None:
    made = lab.up(name, hosts=2, with_witness=True)
    try:
        for host in made.hosts:
            said = Bench(made).inside(
                host.name, "psql", "-h", "witness", "-U", "postgres", "-Atc", "select 6*7"
            )
            assert said == "42\n"
    finally:
        lab.down(name)
    assert traces(name) == []


@pytest.mark.long
def test_two_labs_run_beside_each_other(bench: Bench, name: str) -> None:
    bench.guest("web1")
    other = lab.up(name)
    try:
        guests.start(other, "web1", "beta")
        assert Bench(other).ledgers() == WHOLE
        assert bench.ledgers() == WHOLE
        found = vmckpt("hosts")
        assert found.returncode == 2
        assert "several labs are running" in found.stderr
    finally:
        lab.down(name)


def test_the_ledgers_of_an_undisturbed_guest_are_whole(bench: Bench) -> None:
    bench.guest()
    until(lambda: bench.seen().highest > 20)

    assert bench.ledgers() == WHOLE
    done = bench.good("lab", "verify", "web1", "--name", bench.plan.name, "--json")
    assert done.json["whole"]


def test_a_changed_byte_of_memory_breaks_the_memory_ledger(bench: Bench) -> None:
    bench.guest(shared_memory=True, dirty="64MiB@1MiB/s")
    ram = bench.inside("alpha", "find", "/dev/shm/ram", "-name", "pc.ram").strip()
    # The region is the only large part of memory that is full: hit it in many places.
    bench.inside("alpha", "sh", "-c",
                 f"for mib in $(seq 60 2 250); do printf x | dd of={ram} bs=1 conv=notrunc"
                 " seek=$((mib * 1048576 + 777)) status=none; done")  # fmt: skip

    assert bench.ledgers()["memory"] is False


def test_a_changed_byte_on_the_disk_breaks_the_disk_ledger(bench: Bench) -> None:
    guest = bench.guest()
    until(lambda: bench.seen().highest > 20)
    subprocess.run(
        ["dd", f"of={guest.disk_path}", "bs=512", "seek=5", "count=1", "conv=notrunc",
         "oflag=direct", "if=/dev/zero", "status=none"], check=True,
    )  # fmt: skip

    assert bench.ledgers() == {**WHOLE, "disk": False}
    done = bench.run("lab", "verify", "web1", "--name", bench.plan.name)
    assert done.code == 30
    assert "BROKEN disk" in done.out


def test_the_observer_sees_a_pause_that_the_guest_cannot_see(bench: Bench) -> None:
    bench.guest()
    until(lambda: bench.seen().answered_at is not None)
    before, began = bench.seen(), time.monotonic()
    bench.inside("alpha", "virsh", "-q", "suspend", "web1")
    # Less what the observer itself could not see, where the machine is busy.
    until(lambda: bench.seen(since=began).blackout >= 0.5)
    resumed = time.monotonic()
    bench.inside("alpha", "virsh", "-q", "resume", "web1")
    until(lambda: (bench.seen().answered_at or 0.0) > resumed)

    after = bench.seen(since=began)
    assert before.answered_at is not None
    assert after.answered_at is not None
    assert 0.5 <= after.blackout <= after.answered_at - before.answered_at
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_guest_that_was_restarted_is_noticed(bench: Bench) -> None:
    bench.guest()
    bench.inside("alpha", "virsh", "-q", "destroy", "web1")
    bench.inside("alpha", "virsh", "-q", "start", "web1")
    until(lambda: bench.seen().runs == 2)

    assert bench.ledgers()["output"] is False


def test_a_cut_host_is_silent_and_a_healed_one_answers(bench: Bench) -> None:
    def libvirt_answers() -> bool:
        try:
            with socket.create_connection((bench.plan.host("beta").address, 16509), timeout=1):
                return True
        except TimeoutError:
            return False

    bench.good("lab", "cut", "beta", "--name", bench.plan.name)
    assert not libvirt_answers()
    bench.good("lab", "heal", "beta", "--name", bench.plan.name)
    # What was asked in vain before is asked again by TCP and ARP only after a second.
    until(libvirt_answers)


def test_a_killed_host_has_no_process_left_and_comes_back(bench: Bench) -> None:
    bench.guest(on="beta")
    beta = bench.plan.host("beta")
    bench.good("lab", "kill", "beta", "--name", bench.plan.name)
    assert network.processes_in(beta.namespace) == []
    done = bench.run("hosts", "--json")
    assert (done.code, [h["reachable"] for h in done.json]) == (11, [True, False])
    bench.good("lab", "heal", "beta", "--name", bench.plan.name)
    assert bench.inside("beta", "virsh", "list", "--all", "--name").split() == ["web1"]


def test_a_shaped_link_carries_what_it_should(bench: Bench) -> None:
    network.shape(bench.plan, "alpha", parse_rate("80mbit"))
    size, head = 8 << 20, 1 << 20
    ssh = str(bench.plan.folder / "ssh/ssh")
    words = [ssh, f"root@{bench.plan.host('alpha').address}", f"head -c {size} /dev/zero"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as sent:
        assert sent.stdout is not None
        # A login and what buffers hold take their time, too.
        assert len(sent.stdout.read(head)) == head
        began = time.monotonic()
        assert len(sent.stdout.read()) == size - head
    rate = (size - head) * 8 / (time.monotonic() - began) / 1e6

    assert 40 < rate < 90


def test_the_console_of_a_guest_is_kept(bench: Bench) -> None:
    bench.guest()
    log = Path(bench.plan.host("alpha").root, "log", "web1.console").read_text(errors="replace")

    assert "prover: 16384 pages" in log
    assert "did not load" not in log


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("lab", "guest", "w/1", "--on", "alpha"), "use 1 to 24 characters from a-z"),
        (("lab", "guest", "w1", "--on", "omega"), "no host 'omega'"),
        (("lab", "guest", "w1", "--on", "alpha", "--memory", "64MiB"), "at least 128 MiB"),
        (("lab", "guest", "w1", "--on", "alpha", "--dirty", "8@fast"), "use a value like"),
        (("lab", "guest", "w1", "--on", "alpha", "--disk-format", "vdi"), "use raw or qcow2"),
        (("lab", "up", "--qemu-user", "no-one"), "the QEMU user 'no-one' does not exist"),
        (
            ("lab", "up", "--qemu-user", "nobody"),
            "is already running with 2 hosts, no lease store, and QEMU as user root",
        ),
        (("lab", "cut", "omega"), "has no host 'omega'"),
        (("lab", "shape", "alpha", "1 parsec"), "use a value like"),
        (("lab", "verify", "nobody"), "has no guest 'nobody'"),
        (("lab", "remove", "nobody"), "has no guest 'nobody'"),
    ],
)
def test_wrong_words_get_one_line(bench: Bench, args: tuple[str, ...], complaint: str) -> None:
    done = bench.run(*args, "--name", bench.plan.name)

    assert done.code == 2
    assert complaint in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_a_lab_that_is_not_there_is_said_to_be_missing() -> None:
    done = vmckpt("lab", "status", "--name", "nolab")

    assert (done.returncode, "lab 'nolab' is not running" in done.stderr) == (30, True)
