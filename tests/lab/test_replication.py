"""A standby a fraction of a second behind, on real hosts: begun, used, lost, and taken away."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench import WHOLE, Bench, traces, until
from tests.lab.test_guest_agent import started
from vmckpt.lab import guests, host, lab, network

GUEST: dict[str, Any] = {
    "memory": "160MiB",
    "dirty": "32MiB@10MiB/s",
    "shared_memory": True,
    "disk": "32MiB",
}
LEFT = "/dev/shm/vmckpt-replica"
RUNNING = "pgrep -fa 'nbdkit|replicate.guard|agent.replica'"
SOON = 40.0


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    """A lab with a witness, for all tests here."""
    name = f"r{os.getpid()}"
    plan = lab.up(name, hosts=2, with_witness=True)
    yield Bench(plan)
    lab.down(name)
    assert traces(f"{name}/") + traces(f"{name}.") == []


@pytest.fixture
def pair(witnessed: Bench) -> Iterator[Bench]:
    yield witnessed
    witnessed.run("unprotect", "web1")
    for one in witnessed.plan.hosts:
        lab.heal(witnessed.plan, one.name)
    witnessed.run("recover")
    for guest in guests.stored(witnessed.plan):
        guests.remove(witnessed.plan, guest.name)


def protect(bench: Bench, *more: str, automatic: bool = True) -> dict[str, Any]:
    how = "automatic" if automatic else "manual"
    words = ("--to", "beta", "--interval", "200ms", "--failover", how, "--ttl", "4s")
    return dict(bench.good("protect", "web1", *words, "--json", *more).json)


def ours(bench: Bench) -> dict[str, Any]:
    (one,) = bench.good("status", "web1", "--json").json
    return dict(one["says"]["alpha"])


def theirs(bench: Bench) -> dict[str, Any]:
    (one,) = bench.good("status", "web1", "--json").json
    return dict(one["says"]["beta"])


def left(bench: Bench) -> list[str]:
    """What of a protection is on both hosts."""
    found = []
    for name in ("alpha", "beta"):
        listed = bench.inside(
            name,
            "sh",
            "-c",
            f"ls {LEFT} 2>/dev/null; pgrep -fa 'nbdkit|replicate.guard|agent.replica' || true",
        )
        found += [f"{name}: {line}" for line in listed.splitlines() if "pgrep" not in line]
    return found


def on_qemu(bench: Bench, name: str) -> list[str]:
    """Filters and block jobs that a guest's QEMU has, and what is left of its capabilities."""

    def qmp(command: str, **arguments: object) -> Any:
        text = json.dumps({"execute": command, "arguments": arguments})
        told = bench.inside(name, "virsh", "qemu-monitor-command", "web1", text)
        return json.loads(told)["return"]

    found = [one["name"] for one in qmp("qom-list", path="/objects") if "vmckpt" in one["name"]]
    found += [one["device"] for one in qmp("query-block-jobs")]
    on = {one["capability"] for one in qmp("query-migrate-capabilities") if one["state"]}
    return found + sorted(on - {"events"}) + ([] if "events" in on else ["no events"])


def stored(bench: Bench, name: str) -> list[str]:
    """Guests that a host has a definition of."""
    return bench.inside(name, "virsh", "list", "--all", "--persistent", "--name").split()


def agent(bench: Bench, name: str) -> int:
    """The agent's process, as seen from outside of the lab host."""
    pid = host.first_process(bench.plan.host(name))
    assert pid is not None
    for one in network.processes_in(bench.plan.host(name).namespace):
        words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
        if b"vmckpt.agent.replica" in words:
            return one
    raise AssertionError(f"no agent on {name}")


@pytest.mark.long
def test_a_guest_is_protected_and_let_go_again(pair: Bench) -> None:
    pair.guest(**GUEST)
    told = protect(pair)
    assert told["status"]["phase"] == "protecting"
    time.sleep(2.0)
    seen = ours(pair)
    assert seen["epoch"] > 2
    assert 0 < seen["rpo_s"] < 5
    assert theirs(pair)["ready"]
    listed = {one["host"]: one["state"] for one in pair.good("guests", "--json").json}
    assert listed == {"alpha": "running", "beta": "standby"}
    assert pair.run("migrate", "web1", "--to", "beta").code == 18
    assert "virsh" not in pair.inside("alpha", "virsh", "list", "--inactive", "--name")

    pair.good("unprotect", "web1")
    assert left(pair) == []
    assert on_qemu(pair, "alpha") == []
    assert pair.inside("beta", "virsh", "list", "--all", "--name").split() == []
    assert pair.inside("alpha", "virsh", "list", "--all", "--name", "--persistent").split() == [
        "web1"
    ]
    assert pair.ledgers() == WHOLE
    assert pair.good("status", "--json").json == []


def test_a_host_that_dies_is_followed_by_its_standby(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    time.sleep(3.0)
    died = time.monotonic()
    host.power_off(pair.plan.host("alpha"))
    until(lambda: (pair.seen().answered_at or 0) > died + 0.2, limit=SOON)
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE
    lab.heal(pair.plan, "alpha")
    done = pair.good("recover", "--json").json
    assert [one["outcome"] for one in done] == ["completed"]
    assert left(pair) == []
    assert stored(pair, "beta") == ["web1"]
    assert pair.inside("alpha", "virsh", "list", "--all", "--name").split() == []


def test_a_planned_switch_loses_nothing(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair, automatic=False)
    time.sleep(1.0)
    done = pair.good("failover", "web1", "--planned", "--json").json
    assert done["runs_on"] == "beta"
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE
    assert left(pair) == []


@pytest.mark.long
def test_an_agent_that_is_killed_is_started_again_and_goes_on(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    for name in ("alpha", "beta"):
        before = ours(pair)["epoch"]
        os.kill(agent(pair, name), signal.SIGKILL)
        until(lambda: ours(pair).get("epoch", 0) > before + 3, limit=SOON)  # noqa: B023
    assert theirs(pair)["ready"]
    assert pair.where() == ["alpha"]
    assert pair.ledgers() == WHOLE


@pytest.mark.long
def test_a_cut_between_the_hosts_leaves_the_guest_alone_and_then_joins_again(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    network.cut(pair.plan, "beta")
    until(lambda: ours(pair).get("phase") == "alone", limit=SOON)
    assert pair.where() == ["alpha"]
    network.heal(pair.plan, "beta")
    until(lambda: ours(pair).get("phase") == "protecting", limit=SOON)
    assert pair.ledgers() == WHOLE
    assert theirs(pair)["ready"]


@pytest.mark.long
def test_a_host_that_is_cut_off_from_all_ends_its_guest_before_the_other_runs(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    time.sleep(1.0)
    died = time.monotonic()
    network.cut(pair.plan, "alpha", guests_too=True)
    until(lambda: (pair.seen().answered_at or 0) > died + 0.5, limit=SOON)
    # No QEMU of it is left on the host that nobody reaches.
    found = [
        one for one in network.processes_in(pair.plan.host("alpha").namespace)
        if b"qemu-system" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]  # fmt: skip
    assert found == []
    network.heal(pair.plan, "alpha")
    assert pair.ledgers() == WHOLE


@pytest.mark.long
def test_without_a_lease_a_person_decides(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair, automatic=False)
    refused = pair.run("failover", "web1")
    assert refused.code == 18
    assert "--planned" in refused.err


@pytest.mark.long
def test_a_guest_that_shuts_down_ends_its_protection(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    pair.inside("alpha", "virsh", "destroy", "web1")
    until(lambda: left(pair) == [], limit=SOON)
    done = pair.good("recover", "--json").json
    assert [one["outcome"] for one in done] == ["completed"]
    assert pair.where() == []
    assert pair.inside("alpha", "virsh", "list", "--inactive", "--name").split() == ["web1"]


@pytest.mark.long
def test_a_qemu_that_dies_is_followed_at_once(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    time.sleep(1.0)
    for one in network.processes_in(pair.plan.host("alpha").namespace):
        if b"qemu-system" in Path(f"/proc/{one}/cmdline").read_bytes():
            os.kill(one, signal.SIGKILL)
    died = time.monotonic()
    until(lambda: (pair.seen().answered_at or 0) > died + 0.2, limit=SOON)
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE


@pytest.mark.long
def test_a_guest_with_an_agent_has_its_clock_put_right(
    pair: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(pair, tmp_path, monkeypatch, shared_memory=True, stays=True)
    protect(pair, automatic=False)
    until(lambda: (ours(pair)["guest_clock_corrected"] or 0) >= 2, limit=120.0)
    seen = ours(pair)
    # Far less than it has stood still, whose clock counts seconds.
    assert seen["guest_stood_still_s"] > 2.0
    assert seen["guest_clock_behind_s"] < 0.8 * seen["guest_stood_still_s"]
    assert pair.ledgers() == WHOLE
