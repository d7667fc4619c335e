"""The agent that waits on a host between orders, with real orders over ssh."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.lab.bench import WHOLE, Bench, finish, until
from vmckpt_lab import network

GUEST = {"memory": "512MiB", "dirty": "300MiB@20MiB/s", "disk": "32MiB"}


def waiting(bench: Bench, on: str = "alpha") -> list[int]:
    """The agents that wait on a host, as seen from outside of it."""
    found = []
    for one in network.processes_in(bench.plan.host(on).namespace):
        with suppress(OSError):
            if Path(f"/proc/{one}/comm").read_text().strip() == "vmckpt-waiting":
                found.append(one)
    return found


def test_orders_of_several_commands_share_an_agent(kept: Bench) -> None:
    elsewhere = waiting(kept, "beta")  # of tests that used the lab before
    kept.guest(**GUEST)
    taken = kept.good("snapshot", "create", "web1", "--json").json["id"]
    (first,) = waiting(kept)

    kept.good("snapshot", "create", "web1")
    assert waiting(kept) == [first]
    assert kept.ledgers() == WHOLE
    kept.good("snapshot", "restore", taken, "--replace")

    assert waiting(kept) == [first]
    assert set(waiting(kept, "beta")) <= set(elsewhere)


def test_a_killed_agent_is_replaced(kept: Bench) -> None:
    kept.guest(**GUEST)
    kept.good("snapshot", "create", "web1")
    (first,) = waiting(kept)
    taking = kept.start("snapshot", "create", "web1")
    until(lambda: "vmckpt-agent" in kept.inside("alpha", "ps", "-e", "-o", "comm"))

    os.kill(first, signal.SIGKILL)

    done = finish(taking)
    assert done.code == 0, done.err  # the order has its own process
    assert waiting(kept) == []
    kept.good("snapshot", "create", "web1")
    assert len(waiting(kept)) == 1
    assert kept.ledgers() == WHOLE


def test_the_order_of_a_killed_controller_ends(kept: Bench) -> None:
    kept.guest(**GUEST)
    kept.good("snapshot", "create", "web1")
    (first,) = waiting(kept)
    taking = kept.start("snapshot", "create", "web1")
    until(lambda: "vmckpt-agent" in kept.inside("alpha", "ps", "-e", "-o", "comm"))

    taking.kill()
    finish(taking)

    # No process of the order is left, but the agent waits.
    until(lambda: "vmckpt-agent" not in kept.inside("alpha", "ps", "-e", "-o", "comm"))
    assert waiting(kept) == [first]
    kept.good("recover")
    kept.good("snapshot", "create", "web1")
    assert kept.ledgers() == WHOLE
