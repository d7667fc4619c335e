"""Each shipped policy moves a guest that it is made for."""

import pytest

from tests.lab.bench import SLOW, WHOLE, Bench, migrate
from vmckpt.units import Seconds
from vmckpt_lab import delay_proxy, network
from vmckpt_lab.machine_speed import slowness

# Over SLOW its region is dirty again after each pass: only a rule ends it.
HOT = {"memory": "224MiB", "dirty": "80MiB@60MiB/s"}


def slow(bench: Bench) -> None:
    for host in ("alpha", "beta"):
        network.shape(bench.plan, host, SLOW)


@pytest.mark.parametrize(
    "policy",
    [
        "balanced",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("maintenance", "must-finish")),
    ],
)
def test_policies_with_post_copy_finish_a_hot_guest(bench: Bench, policy: str) -> None:
    bench.guest(**HOT)
    slow(bench)
    done = migrate(bench, "beta", "--policy", policy)

    assert (done.code, done.json["policy"]) == (0, policy), done.err
    assert "switch to post-copy" in [one["action"] for one in done.json["decisions"]]
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_low_downtime_gives_up_rather_than_pause_for_long(bench: Bench) -> None:
    bench.guest(**HOT)
    slow(bench)
    done = migrate(bench, "beta", "--policy", "low-downtime", "--timeout", "40s")

    assert done.code == 20, done.err
    assert done.json["outcome"] in ("not-converged", "timed-out")
    assert done.json["switched_ms"] is None
    assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_low_downtime_keeps_its_word_with_a_calm_guest(bench: Bench) -> None:
    bench.guest(dirty="32MiB@2MiB/s")
    done = migrate(bench, "beta", "--policy", "low-downtime")

    assert done.code == 0, done.err
    # Of 100 ms that are allowed; the rest is what guests without KVM on two cores make of it.
    assert done.json["observed_downtime_ms"] < 400 * slowness()
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_must_finish_without_post_copy_pauses_in_the_end(bench: Bench) -> None:
    bench.guest(**HOT)
    slow(bench)
    done = migrate(bench, "beta", "--policy", "must-finish", "--mode", "precopy")

    assert done.code == 0, done.err
    assert done.json["switched_ms"] is None
    assert done.json["decisions"]
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_never_postcopy_slows_the_guest_down(bench: Bench) -> None:
    bench.guest(**HOT)
    slow(bench)
    done = migrate(bench, "beta", "--policy", "never-postcopy", "--timeout", "90s")

    assert done.json["switched_ms"] is None
    assert any("slow the guest down" in one["action"] for one in done.json["decisions"])
    assert max(sample["throttle"] for sample in done.json["samples"]) >= 20
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_huge_memory_sends_over_several_connections(bench: Bench) -> None:
    bench.guest(dirty="64MiB@20MiB/s")
    done = migrate(bench, "beta", "--policy", "huge-memory")

    assert done.code == 0, done.err
    assert done.json["mode"] == "precopy"
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_wan_carries_a_guest_far_away_encrypted(bench: Bench) -> None:
    bench.guest(memory="192MiB", dirty="32MiB@4MiB/s")
    delay_proxy.put(bench.plan, "beta", Seconds(0.04))
    try:
        done = migrate(bench, "beta", "--policy", "wan")
    finally:
        delay_proxy.put(bench.plan, "beta", None)

    assert done.code == 0, done.err
    assert bench.where() == ["beta"]
    assert bench.ledgers() == WHOLE
