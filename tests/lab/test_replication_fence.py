"""Guests without a lease store, whose dead host is powered off before their standby runs."""

import json
import signal
import time
from collections.abc import Iterator

import pytest

from tests.lab.bench import WHOLE, until
from tests.lab.fenced import SECRET, SOON, Fencing, fenced_lab, goes_on, protected
from vmckpt_lab import lab, network
from vmckpt_lab.invariants import Lookout


@pytest.fixture(scope="module")
def unleased(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fencing]:
    """For all tests here."""
    with fenced_lab(tmp_path_factory.mktemp("fence")) as made:
        yield made


@pytest.fixture
def pair(unleased: Fencing) -> Iterator[Fencing]:
    with protected(unleased, "--failover", "manual") as made:
        yield made


@pytest.mark.long
def test_a_host_that_nobody_reaches_is_powered_off_before_its_guest_runs_elsewhere(
    pair: Fencing,
) -> None:
    (one,) = pair.good("status", "web1", "--json").json
    with Lookout(pair.plan) as lookout:
        network.cut(pair.plan, "alpha", guests_too=True)
        assert pair.runs() == ["alpha"]  # nobody knows, and it runs on
        done = pair.good("failover", "web1", "--json")
        goes_on(pair, time.monotonic())
        # The old host comes back, and has nothing that could run.
        lab.heal(pair.plan, "alpha")
        assert pair.runs() == ["beta"]
        assert pair.inside("alpha", "virsh", "list", "--all", "--name").split() == []
        assert lookout.two_copies() == []
        assert lookout.looks > 100
    assert pair.ledgers() == WHOLE
    told = done.json
    assert (told["runs_on"], told["fenced"]["host"], told["fenced"]["answered"]) == (
        "beta", "alpha", "off",
    )  # fmt: skip
    assert f"powering it and all its guests off with {pair.tmp / 'fence_lab'}\n" in done.err
    assert pair.actions == ["off", "status"]
    steps = pair.good("job", one["job"], "--json").json["steps"]
    (step,) = [one for one in steps if one["name"] == "fence"]
    assert (step["state"], step["result"]["answered"]) == ("done", "off")
    assert SECRET not in done.out + done.err + json.dumps(steps)
    pair.no_secret()


@pytest.mark.long
@pytest.mark.parametrize("mode", [pytest.param("fails", marks=pytest.mark.campaign), "lies"])
def test_a_host_that_may_be_on_keeps_its_guest(pair: Fencing, mode: str) -> None:
    pair.behaves(mode)
    with Lookout(pair.plan) as lookout:
        network.cut(pair.plan, "alpha", guests_too=True)
        refused = pair.run("failover", "web1")
        assert refused.code == 25
        assert "alpha is not known to be off" in refused.err
        assert "Traceback" not in refused.err
        assert SECRET not in refused.out + refused.err
        assert pair.powered
        assert pair.runs() == ["alpha"]
        # It was cut off for so long that it went on alone; its standby is brought up again.
        network.heal(pair.plan, "alpha")
        until(lambda: _phase(pair) == "protecting", limit=SOON)
        assert pair.runs() == ["alpha"]
        assert lookout.two_copies() == []
    assert pair.ledgers() == WHOLE
    pair.no_secret()


@pytest.mark.long
def test_a_host_with_two_supplies_is_off_only_without_both(pair: Fencing) -> None:
    with pair.two_supplies(), Lookout(pair.plan) as lookout:
        found = pair.run("doctor", "alpha", "--json").json
        assert len([one for one in found if one["code"] == "fence"]) == 3
        (pair.tmp / "calls").unlink()
        network.cut(pair.plan, "alpha", guests_too=True)
        pair.behaves("stuck")
        refused = pair.run("failover", "web1")
        assert refused.code == 25
        assert "fence_ipmilan (level 1): the host could not be switched off" in refused.err
        assert (
            "fence_lab (level 2, device 2 of 2): the host could not be switched off" in refused.err
        )
        assert pair.powered
        assert pair.runs() == ["alpha"]
        pair.behaves("works")
        done = pair.good("failover", "web1", "--json").json
        goes_on(pair, time.monotonic())
        assert lookout.two_copies() == []
    assert (done["fenced"]["level"], len(done["fenced"]["devices"])) == (2, 2)
    assert pair.actions == ["off", "off", "off", "off", "status", "status"]
    pair.no_secret()


@pytest.mark.campaign
@pytest.mark.long
def test_a_controller_that_is_killed_in_between_is_followed_by_the_next(pair: Fencing) -> None:
    pair.behaves("hangs")
    with Lookout(pair.plan) as lookout:
        network.cut(pair.plan, "alpha", guests_too=True)
        first = pair.start("failover", "web1")
        until(lambda: "status" in pair.actions, limit=SOON)
        assert not pair.powered
        first.send_signal(signal.SIGKILL)
        first.communicate()
        assert pair.runs() == []
        pair.behaves("works")
        pair.good("failover", "web1")
        goes_on(pair, time.monotonic())
        assert lookout.two_copies() == []


@pytest.mark.campaign
def test_a_host_that_answers_is_powered_off_only_if_that_is_asked_for(pair: Fencing) -> None:
    found = pair.run("doctor", "alpha", "--json").json
    (fence,) = [one for one in found if one["code"] == "fence"]
    assert (fence["severity"], "reports power on" in fence["text"]) == ("ok", True)
    refused = pair.run("failover", "web1")
    assert refused.code == 18
    assert "--fence powers it off first" in refused.err
    assert pair.powered
    assert pair.actions == ["status"]
    with Lookout(pair.plan) as lookout:
        pair.good("failover", "web1", "--fence")
        goes_on(pair, time.monotonic())
        assert lookout.two_copies() == []


def _phase(pair: Fencing) -> str | None:
    (one,) = pair.good("status", "web1", "--json").json
    phase = one["says"]["alpha"].get("phase")
    return None if phase is None else str(phase)
