"""A standby a fraction of a second behind, on real hosts: begun, used, lost, and taken away."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench import WHOLE, Bench, until
from tests.lab.guest_agents import started
from tests.lab.protecting import (
    GUEST,
    SOON,
    agent,
    asked,
    epochs,
    lab_with_witness,
    left,
    on_qemu,
    ours,
    processes,
    protect,
    signalled,
    stored,
    theirs,
    tidied,
)
from tests.support.doc_examples import shown
from tests.support.following import take
from vmckpt_lab import guests, host, lab, network
from vmckpt_lab.machine_speed import slowness


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"r{os.getpid()}") as made:
        yield made


@pytest.fixture
def pair(witnessed: Bench) -> Iterator[Bench]:
    with tidied(witnessed) as made:
        yield made


@pytest.mark.long
def test_a_guest_is_protected_and_let_go_again(pair: Bench) -> None:
    pair.guest(**GUEST)
    told = protect(pair)
    assert told["status"]["phase"] == "protecting"
    epochs(pair)
    seen = ours(pair)
    assert seen["epoch"] > 2
    assert 0 < seen["rpo_s"] < 5 * slowness()
    assert theirs(pair)["ready"]
    shown("replication.md", "vmckpt status", pair.good("status").out)
    listed = {one["host"]: one["state"] for one in pair.good("guests", "--json").json}
    assert listed == {"alpha": "running", "beta": "standby"}
    refused = pair.run("migrate", "web1", "--to", "beta")
    assert refused.code == 18
    (unprotect,) = take(refused.err)
    assert take(pair.run("cancel", "web1").err) == (unprotect,)
    assert "virsh" not in pair.inside("alpha", "virsh", "list", "--inactive", "--name")

    pair.good(*unprotect.words[1:])
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
    epochs(pair)
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


@pytest.mark.long
@pytest.mark.parametrize("screen", ["vga", "virtio"])
def test_a_guest_with_the_devices_of_virt_install_is_protected_as_it_is(
    pair: Bench, monkeypatch: pytest.MonkeyPatch, screen: str
) -> None:
    plain = guests.domain_xml

    def with_more(*words: Any) -> str:
        more = f"<video><model type='{screen}'/></video><memballoon model='virtio'/>"
        xml = plain(*words).replace("<memballoon model='none'/>", more)
        return xml.replace("machine='pc'", "machine='q35'")

    monkeypatch.setattr(guests, "domain_xml", with_more)
    pair.guest(**GUEST, boot=True)
    forecast = pair.good("protect", "web1", "--to", "beta", "--dry-run", "--json").json
    assert 0 < forecast["expected_pause"] < 0.5
    protect(pair)
    assert ours(pair)["finder"] == "write-tracking"
    epochs(pair)
    host.power_off(pair.plan.host("alpha"))
    until(lambda: pair.where() == ["beta"], limit=SOON)
    heard = pair.seen().heard
    until(lambda: pair.seen().heard > heard + 5, limit=SOON)
    assert pair.ledgers() == WHOLE
    lab.heal(pair.plan, "alpha")
    pair.good("recover", "--json")
    assert left(pair) == []
    assert "memfd" not in pair.inside("beta", "virsh", "dumpxml", "--inactive", "web1")


@pytest.mark.long
def test_a_planned_switch_loses_nothing(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair, automatic=False)
    epochs(pair)
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
        until(lambda: asked(pair).get("epoch", 0) > before + 3, limit=SOON)  # noqa: B023
    assert theirs(pair)["ready"]
    assert pair.where() == ["alpha"]
    assert pair.ledgers() == WHOLE


@pytest.mark.long
def test_a_cut_between_the_hosts_leaves_the_guest_alone_and_then_joins_again(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    network.cut(pair.plan, "beta")
    until(lambda: asked(pair).get("phase") == "alone", limit=SOON)
    assert pair.where() == ["alpha"]
    network.heal(pair.plan, "beta")
    until(lambda: asked(pair).get("phase") == "protecting", limit=SOON)
    assert pair.ledgers() == WHOLE
    assert theirs(pair)["ready"]


@pytest.mark.long
def test_a_host_that_is_cut_off_from_all_ends_its_guest_before_the_other_runs(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    epochs(pair)
    died = time.monotonic()
    network.cut(pair.plan, "alpha", guests_too=True)
    until(lambda: (pair.seen().answered_at or 0) > died + 0.5, limit=SOON)
    # No QEMU of it is left on the host that nobody reaches.
    assert processes(pair, "alpha", b"qemu-system") == []
    network.heal(pair.plan, "alpha")
    assert pair.ledgers() == WHOLE


@pytest.mark.long
def test_without_a_lease_a_person_decides(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair, automatic=False)
    refused = pair.run("failover", "web1")
    assert refused.code == 18
    assert "--planned" in refused.err


def theirs_on(bench: Bench, name: str) -> dict[str, Any]:
    """What the backup's agent says, of a backup that is not beta."""
    return dict(bench.good("status", "web1", "--json").json[0]["says"][name])


@pytest.mark.long
def test_a_standby_of_a_guest_that_died_runs_as_the_messages_say(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair, automatic=False)
    epochs(pair)
    signalled(pair, "alpha", b"qemu-system", signal.SIGKILL)
    until(lambda: theirs_on(pair, "alpha").get("outcome") == "died", limit=SOON)
    (failover,) = take(pair.good("status", "web1", "--json").json[0]["next_step"])
    waits = pair.run("recover").out
    assert take(waits)[0] == failover
    pair.good(*failover.words[1:])
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE


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
    epochs(pair)
    signalled(pair, "alpha", b"qemu-system", signal.SIGKILL)
    died = time.monotonic()
    until(lambda: (pair.seen().answered_at or 0) > died + 0.2, limit=SOON)
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE
    pair.follow(pair.good("status", "web1", "--json").json[0]["next_step"])
    assert theirs_on(pair, "alpha")["ready"]


@pytest.mark.long
def test_a_guest_with_an_agent_has_its_clock_put_right(
    pair: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(pair, tmp_path, monkeypatch, stays=True)
    protect(pair, automatic=False)
    until(lambda: (asked(pair).get("guest_clock_corrected") or 0) >= 2, limit=240.0)
    seen = ours(pair)
    # Far less than it has stood still, whose clock counts seconds.
    assert seen["guest_stood_still_s"] > 1.0
    assert seen["guest_clock_behind_s"] < 0.8 * seen["guest_stood_still_s"]
    assert pair.ledgers() == WHOLE
