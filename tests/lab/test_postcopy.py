"""Post-copy from the command line: the switch, a link that is cut in it, and going on by hand."""

import json
import re
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.lab.bench import SLOW, WHOLE, Bench, Done, answers, finish, first_line, until
from vmckpt_lab import network
from vmckpt_lab.machine_speed import slowness

# Over SLOW its 96 MiB are dirty again after each pass: only post-copy ends it.
HOT = {"memory": "224MiB", "dirty": "96MiB@60MiB/s"}


def slow(bench: Bench, **wishes: Any) -> None:
    bench.guest(**(HOT | wishes))
    for host in ("alpha", "beta"):
        network.shape(bench.plan, host, SLOW)


def switched(bench: Bench, *more: str) -> "subprocess.Popen[str]":
    """A migration that has just gone into post-copy."""
    process = bench.start("migrate", "web1", "--to", "beta", "--json", "--tls", "off", *more)
    first_line(process, "phase=post-copy")
    return process


def actions(done: Done) -> list[str]:
    return [decision["action"] for decision in done.json["decisions"]]


def at_home_on_beta(bench: Bench) -> None:
    assert bench.where() == ["beta"]
    assert bench.inside("alpha", "virsh", "list", "--all", "--name").split() == []
    assert bench.inside("beta", "virsh", "list", "--persistent", "--name").split() == ["web1"]
    assert bench.ledgers() == WHOLE


def test_what_pre_copy_cannot_end_post_copy_ends(bench: Bench) -> None:
    slow(bench)
    done = bench.good("migrate", "web1", "--to", "beta", "--json")

    assert (done.json["outcome"], done.json["mode"]) == ("completed", "hybrid")
    assert done.json["policy"] == "balanced"
    assert actions(done) == ["switch to post-copy"]
    assert done.json["decisions"][0]["rule"] == "pre-copy does not pay off"
    assert done.json["switched_ms"] > 1000
    # Clients also wait for pages.
    assert 0 < done.json["downtime_ms"] < done.json["observed_downtime_ms"] + 1000 * slowness()
    at_home_on_beta(bench)


def test_what_newer_versions_offer_is_in_force(bench: Bench) -> None:
    """See ADR 18; what lies between these two versions of libvirt was not tried."""
    slow(bench)
    process = switched(bench)
    asked = '{"execute": "query-migrate-capabilities"}'
    told = json.loads(bench.inside("alpha", "virsh", "qemu-monitor-command", "web1", asked))
    assert finish(process).json["outcome"] == "completed"

    on = {one["capability"] for one in told["return"] if one["state"]}
    found = re.search(r"(\d+)\.(\d+)", bench.inside("alpha", "libvirtd", "--version"))
    assert found is not None
    version = (int(found[1]), int(found[2]))
    assert "postcopy-ram" in on
    if version >= (11, 3):
        assert {"postcopy-preempt", "switchover-ack"} <= on
    elif version <= (9, 0):
        assert not {"postcopy-preempt", "switchover-ack"} & on


@pytest.mark.long
def test_mode_postcopy_switches_in_the_first_pass(bench: Bench) -> None:
    bench.guest(dirty="64MiB@10MiB/s")
    network.shape(bench.plan, "alpha", SLOW)
    done = bench.good("migrate", "web1", "--to", "beta", "--mode", "postcopy", "--json")

    assert done.json["decisions"][0]["rule"] == "mode"
    assert done.json["decisions"][0]["numbers"]["iteration"] == 1
    at_home_on_beta(bench)


@pytest.mark.parametrize(
    "seconds",
    [
        *(pytest.param(s, marks=pytest.mark.long) for s in (1.0, 10.0)),
        pytest.param(60.0, marks=pytest.mark.campaign),
    ],
    ids=lambda s: f"{s:g}s",
)
def test_a_link_cut_in_post_copy_is_survived(bench: Bench, seconds: float) -> None:
    slow(bench)
    process = switched(bench)
    network.cut(bench.plan, "beta")
    time.sleep(seconds)  # for as long as it is cut
    assert process.poll() is None
    network.heal(bench.plan, "beta")
    done = finish(process, limit=180.0)

    assert done.json["outcome"] == "completed", done.err
    # TCP brings such a stream back by itself; to resume it would risk what ADR 10 tells.
    assert "resume post-copy" not in actions(done)
    assert ("keep both parts" in actions(done)) == (seconds > 5)
    at_home_on_beta(bench)


@pytest.mark.long
def test_a_stream_that_is_reset_in_post_copy_is_resumed(bench: Bench) -> None:
    slow(bench)
    process = switched(bench)
    # The pages that QEMU's own devices use have arrived once it writes and sends again.
    answers(bench)
    bench.inside("alpha", "ss", "-K", "-t", "dport", "ge", "49152", "dport", "le", "49215")
    done = finish(process, limit=100.0)

    assert done.json["outcome"] == "completed", done.err
    assert "resume post-copy" in actions(done)
    at_home_on_beta(bench)


@pytest.mark.long
def test_a_cut_that_lasts_asks_the_operator_who_resumes_by_hand(bench: Bench) -> None:
    slow(bench)
    patient = bench.plan.folder / "impatient.yaml"
    patient.write_text(
        "version: vmckpt/v1\nname: impatient\nmode: postcopy\nlimits: {max_downtime: 300ms}\n"
        "on_postcopy_broken: recover for 8s, then ask\n"
    )
    process = switched(bench, "--policy", str(patient))
    network.cut(bench.plan, "beta")
    done = finish(process, limit=120.0)

    assert (done.code, done.json["outcome"]) == (22, "postcopy-paused"), done.err
    assert "vmckpt resume m-" in done.err
    assert bench.inside("alpha", "virsh", "domstate", "web1").split() == ["paused"]
    network.heal(bench.plan, "beta")
    again = bench.good("resume", done.json["job"], "--json")

    assert again.json["outcome"] == "completed"
    at_home_on_beta(bench)


@pytest.mark.long
def test_a_killed_controller_leaves_a_post_copy_that_another_one_resumes(bench: Bench) -> None:
    slow(bench)
    process = switched(bench)
    network.cut(bench.plan, "beta")
    process.kill()
    finish(process)
    # Without a controller only libvirt's own keep-alive notices, after half a minute.
    until(lambda: "unattended" in bench.good("jobs").out)
    time.sleep(1.0)  # for as long as it is cut, with nobody there
    network.heal(bench.plan, "beta")
    bench.run("resume", "web1")
    until(lambda: bench.where() == ["beta"], limit=60.0)
    until(lambda: bench.seen(since=time.monotonic() - 1.0).blackout < 0.9, limit=60.0)

    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_ctrl_c_in_post_copy_ends_nothing(bench: Bench) -> None:
    slow(bench)
    process = switched(bench)
    process.send_signal(signal.SIGINT)
    done = finish(process)

    assert (done.code, done.json["outcome"]) == (0, "completed")
    at_home_on_beta(bench)


@pytest.mark.long
def test_a_target_that_dies_in_post_copy_is_told_as_it_is(bench: Bench) -> None:
    slow(bench)
    process = switched(bench)
    bench.good("lab", "kill", "beta", "--name", bench.plan.name)
    time.sleep(2.0)  # for as long as it is off
    bench.good("lab", "heal", "beta", "--name", bench.plan.name)
    done = finish(process, limit=30.0)

    assert done.json["outcome"] == "lost", done.err
    assert "part of web1's memory is lost" in done.err
    assert bench.inside("alpha", "virsh", "domstate", "web1").split() == ["paused"]
