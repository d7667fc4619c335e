"""A migration steered from another terminal, without a daemon."""

import json
import subprocess

import pytest

from tests.lab.bench import BUSY, SLOW, WHOLE, Bench, finish, first_line, until
from vmckpt.units import parse_rate
from vmckpt_lab import network


def running(bench: Bench, *more: str) -> "subprocess.Popen[str]":
    """A pre-copy that goes on until somebody ends it."""
    bench.guest(**BUSY)
    for host in ("alpha", "beta"):
        network.shape(bench.plan, host, SLOW)
    process = bench.start("migrate", "web1", "--to", "beta", "--tls", "off", "--json", *more)
    first_line(process, "iteration=1")
    return process


def test_another_terminal_sees_it_and_changes_its_limits(bench: Bench) -> None:
    process = running(bench, "--mode", "precopy")
    shown = bench.good("jobs", "--json").json
    watch = bench.start("watch", "web1")
    first_line(watch, "pre-copy")  # it watches
    bench.good("set", "web1", "--bandwidth", "2MiB/s")

    def slowed() -> bool:
        last = bench.good("job", "web1", "--json").json["samples"][-1]
        return bool(last["bandwidth"] < 4 << 20)

    until(slowed)
    bench.good("set", "web1", "--bandwidth", "unlimited", "--max-downtime", "20s")
    done = finish(process)
    watched = finish(watch)

    assert [(job["guest"], job["phase"]) for job in shown] == [("web1", "pre-copy")]
    assert done.json["outcome"] == "completed"
    assert done.json["downtime_ms"] > 300
    # On a busy machine the policy may have a word about the slow link, too.
    assert [one["rule"] for one in done.json["decisions"]].count("operator") == 3
    assert "allow 20.0 s of downtime" in watched.err + watched.out
    assert bench.ledgers() == WHOLE


def test_another_terminal_switches_it_to_post_copy(bench: Bench) -> None:
    never = bench.plan.folder / "patient.yaml"
    never.write_text(
        "version: vmckpt/v1\nname: patient\nmode: hybrid\nlimits: {max_downtime: 20ms}\n"
        "converge: {rules: [{when: {iteration: 1000}, do: start_postcopy}]}\n"
    )
    process = running(bench, "--policy", str(never))
    # However busy the machine is, the cancel comes while pages are still to be fetched.
    network.shape(bench.plan, "alpha", parse_rate("20mbit"))
    bench.good("postcopy", "web1")
    refused = bench.run("cancel", "web1")
    network.shape(bench.plan, "alpha", None)
    done = finish(process)

    assert refused.code == 2
    assert "it cannot be cancelled" in refused.err
    assert done.json["outcome"] == "completed"
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_another_terminal_pauses_it_to_the_end(bench: Bench) -> None:
    process = running(bench, "--mode", "precopy", "--max-downtime", "20ms")
    bench.good("pause", "web1")
    done = finish(process)

    assert done.json["outcome"] == "completed"
    assert done.json["observed_downtime_ms"] > 500
    assert bench.ledgers() == WHOLE


def test_another_terminal_cancels_it(bench: Bench) -> None:
    process = running(bench, "--mode", "precopy", "--max-downtime", "20ms")
    bench.good("cancel", "web1")
    done = finish(process)

    assert (done.code, done.json["outcome"]) == (130, "cancelled")
    assert bench.where() == ["alpha"]


@pytest.mark.long
def test_what_a_dead_controller_left_running_is_steered_directly(bench: Bench) -> None:
    process = running(bench, "--mode", "precopy", "--max-downtime", "20ms")
    process.kill()
    finish(process)
    state = bench.good("jobs").out
    told = bench.good("cancel", "web1").out
    until(lambda: bench.inside("alpha", "virsh", "domjobinfo", "web1").split()[2] == "None")

    assert "unattended" in state
    assert "done directly on alpha" in told
    assert bench.where() == ["alpha"]


@pytest.mark.long
def test_observe_tells_what_it_would_do_and_does_nothing(bench: Bench) -> None:
    bench.guest(dirty="48MiB@12MiB/s")
    for host in ("alpha", "beta"):
        network.shape(bench.plan, host, SLOW)
    limit = bench.inside("alpha", "virsh", "-q", "migrate-getmaxdowntime", "web1").strip()
    done = bench.good(
        "migrate", "web1", "--to", "beta", "--json", "--tls", "off", "--observe",
        "--mode", "postcopy",
    )  # fmt: skip

    assert limit == "300"
    assert [(one["action"], one["acted"]) for one in done.json["decisions"]] == [
        ("switch to post-copy", False)
    ]
    assert done.json["switched_ms"] is None
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_trace_can_be_replayed_under_another_policy(bench: Bench) -> None:
    bench.guest(dirty="96MiB@60MiB/s", memory="224MiB")
    for host in ("alpha", "beta"):
        network.shape(bench.plan, host, SLOW)
    path = bench.plan.folder / "trace.jsonl"
    bench.good("migrate", "web1", "--to", "beta", "--tls", "off", "--trace", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    replayed = bench.good("policy", "replay", str(path), "--policy", "never-postcopy", "--json")
    path.unlink()

    assert lines[0]["policy"] == "balanced"
    assert lines[-1] == {"outcome": "completed"}
    assert replayed.json["decisions"]
    assert "switch to post-copy" not in [one["action"] for one in replayed.json["decisions"]]
