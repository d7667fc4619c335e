"""A guest that has failed over is protected back: its old images are taken, by differences."""

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.bench import WHOLE, Bench, answers, finish, traces, until
from tests.lab.protecting import LEFT, TTL, agent, epochs, left, on_qemu, stored
from vmckpt.units import MIB
from vmckpt_lab import guests, host, lab

GUEST: dict[str, Any] = {
    "memory": "160MiB", "dirty": "32MiB@10MiB/s", "disk": "128MiB",
    "written": "64MiB", "private_disk": True,
}  # fmt: skip
HOW = ("--interval", "200ms", "--failover", "automatic", "--ttl", f"{TTL:g}s", "--json")
PATIENT = ("--interval", "200ms", "--failover", "automatic", "--ttl", "20s", "--json")
"""For agents that are killed: a new one has that long to come, on a machine that is busy."""
SOON = 40.0
BEGINS = 110.0
"""So long a protection may take until it reads disks, there."""


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    name = f"rr{os.getpid()}"
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


def image(bench: Bench, name: str) -> str:
    """The image that a guest has on a host."""
    lines = bench.inside(name, "virsh", "domblklist", "web1").splitlines()
    (found,) = (line.split()[1] for line in lines if line.strip().startswith("vda"))
    return found


def qmp(bench: Bench, name: str, command: str) -> Any:
    text = json.dumps({"execute": command})
    return json.loads(bench.inside(name, "virsh", "qemu-monitor-command", "web1", text))["return"]


def switched(bench: Bench, to: str) -> None:
    done = bench.good("failover", "web1", "--planned", "--json").json
    assert done["runs_on"] == to
    assert bench.where() == [to]
    assert bench.ledgers() == WHOLE
    assert left(bench) == []
    assert stored(bench, to) == ["web1"]


@pytest.mark.long
def test_a_host_that_is_back_gets_only_what_differs(pair: Bench) -> None:
    pair.guest(**GUEST)
    first = image(pair, "alpha")
    pair.good("protect", "web1", "--to", "beta", *HOW)
    epochs(pair)
    died = time.monotonic()
    host.power_off(pair.plan.host("alpha"))
    until(lambda: (pair.seen().answered_at or 0) > died + 0.2, limit=SOON)
    second = image(pair, "beta")

    early = pair.run("protect", "web1", "--reverse", *HOW)
    assert early.code == 18
    assert "vmckpt recover" in early.err

    lab.heal(pair.plan, "alpha")
    pair.good("recover")
    planned = pair.good("protect", "web1", "--reverse", "--dry-run", "--json").json
    assert planned["backup"] == "alpha"
    (found,) = (one for one in planned["findings"] if one["code"].startswith("image"))
    assert (found["code"], first in found["text"]) == ("image-taken", True)

    told = pair.good("protect", "web1", "--reverse", *HOW).json
    assert (told["primary"], told["backup"]) == ("beta", "alpha")
    assert told["status"]["disks_compared_bytes"] == told["status"]["disks_bytes"] == 128 * MIB
    assert 0 < told["status"]["disks_sent_bytes"] < 16 * MIB
    assert qmp(pair, "beta", "query-block-exports") == []
    answers(pair)
    switched(pair, "alpha")
    assert image(pair, "alpha") == first

    # And there again, by the image that it had there; let go, that is left as it is.
    told = pair.good("protect", "web1", "--reverse", *HOW).json
    assert told["backup"] == "beta"
    assert told["status"]["disks_sent_bytes"] < 16 * MIB
    assert pair.where() == ["alpha"]
    done = pair.good("unprotect", "web1")
    assert f"kept {second}, which existed before" in done.err
    assert left(pair) == []
    pair.inside("beta", "test", "-e", second)
    assert pair.ledgers() == WHOLE


@pytest.mark.campaign
@pytest.mark.long
def test_an_image_that_is_gone_is_named_and_copied(pair: Bench) -> None:
    pair.guest(**GUEST)
    first = image(pair, "alpha")
    pair.good("protect", "web1", "--to", "beta", *HOW)
    switched(pair, "beta")
    pair.inside("alpha", "mv", first, f"{first}.aside")

    refused = pair.run("protect", "web1", "--reverse", "--to", "beta", *HOW)
    assert "ran on alpha before" in refused.err
    told = pair.good("protect", "web1", "--reverse", *HOW).json
    (found,) = (one for one in told["findings"] if one["code"].startswith("image"))
    assert (found["code"], f"{first} does not exist" in found["text"]) == ("image-not-taken", True)
    assert told["status"]["disks_sent_bytes"] >= 64 * MIB
    switched(pair, "alpha")
    assert image(pair, "alpha") != first
    pair.inside("alpha", "rm", f"{first}.aside")


@pytest.mark.campaign
def test_an_agent_that_dies_while_it_reads_the_disks_leaves_no_door_open(pair: Bench) -> None:
    pair.guest(**{**GUEST, "disk": "1GiB", "written": "512MiB"})
    begun = pair.start("protect", "web1", "--to", "beta", *PATIENT)
    until(lambda: qmp(pair, "alpha", "query-block-exports") != [], limit=BEGINS)
    os.kill(agent(pair, "alpha"), signal.SIGKILL)
    done = finish(begun)
    assert done.code == 0, done.err
    assert done.json["status"]["disks_compared_bytes"] == 1024 * MIB
    assert qmp(pair, "alpha", "query-block-exports") == []
    assert "read" not in pair.inside("alpha", "sh", "-c", f"ls {LEFT}/*").split()
    switched(pair, "beta")

    # Given up in the middle of it, the same.
    begun = pair.start("protect", "web1", "--reverse", *PATIENT)
    until(lambda: qmp(pair, "beta", "query-block-exports") != [], limit=BEGINS)
    begun.send_signal(signal.SIGINT)
    assert finish(begun).code != 0
    assert qmp(pair, "beta", "query-block-exports") == []
    assert on_qemu(pair, "beta") == []
    assert left(pair) == []
    assert pair.ledgers() == WHOLE
