"""Guests without a lease store that vmckpt run watches over: it powers dead hosts off unasked."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab.bench import WHOLE, finish, until
from tests.lab.fenced import SECRET, SOON, Fencing, fenced_lab, goes_on, protected
from vmckpt_lab import host, lab, network
from vmckpt_lab.invariants import Lookout
from vmckpt_lab.processes import Census

NOBODY = "02:00:00:00:00:99"


@pytest.fixture(scope="module")
def unleased(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fencing]:
    """For all tests here."""
    with fenced_lab(tmp_path_factory.mktemp("vigil")) as made:
        yield made


@pytest.fixture
def pair(unleased: Fencing) -> Iterator[Fencing]:
    with protected(unleased, "--failover", "automatic") as made:
        yield made


@contextmanager
def watching(pair: Fencing) -> Iterator[list[dict[str, Any]]]:
    """A service keeps watch; afterwards the list has what it told."""
    service = pair.start("run", "--json")
    told: list[dict[str, Any]] = []
    try:
        yield told
    finally:
        service.send_signal(signal.SIGTERM)
        done = finish(service, limit=60.0)
    told += [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 0, done.err
    assert SECRET not in done.out + done.err


def apart(pair: Fencing, away: str) -> None:
    """Alpha and beta do not reach each other; all others reach both. `away`: "replace" or "del"."""
    for one, other in (("alpha", "beta"), ("beta", "alpha")):
        where = f"{pair.plan.host(other).address} dev eth0"
        if away == "replace":
            pair.inside(one, *f"ip neigh replace {where} lladdr {NOBODY} nud permanent".split())
        else:  # it may be gone with a link that was down meanwhile
            pair.inside(one, "sh", "-c", f"ip neigh del {where} 2>/dev/null || true")


def status(pair: Fencing) -> dict[str, Any]:
    (one,) = pair.good("status", "web1", "--json").json
    return dict(one)


def primary(pair: Fencing) -> dict[str, Any]:
    return dict(status(pair)["says"]["alpha"])


def leaves(pair: Fencing, job: str) -> list[str]:
    """The states of the steps that gave leave to go on alone."""
    steps = pair.good("job", job, "--json").json["steps"]
    return [one["state"] for one in steps if one["name"] == "alone"]


@pytest.mark.long
def test_a_dead_host_is_powered_off_unasked_and_its_guest_runs_on_the_standby(
    pair: Fencing,
) -> None:
    with Lookout(pair.plan) as lookout, watching(pair) as told:
        time.sleep(8.0)  # all is well: nothing is done, longer than a dead host is waited for
        assert pair.actions == []
        network.cut(pair.plan, "alpha", guests_too=True)
        goes_on(pair, time.monotonic())
        assert lookout.two_copies() == []
    assert pair.actions == ["off", "status"]
    (done,) = [one for one in told if one["event"] == "failed over"]
    assert (done["runs_on"], done["fenced"]["host"]) == ("beta", "alpha")
    assert pair.run("status", "web1").code != 0  # it is protected no more
    pair.no_secret()


@pytest.mark.long
def test_a_guest_cut_off_from_its_standby_alone_goes_on_and_is_not_failed_over(
    pair: Fencing,
) -> None:
    job = status(pair)["job"]
    with Lookout(pair.plan) as lookout, watching(pair) as told:
        apart(pair, "replace")
        until(lambda: primary(pair)["phase"] == "alone", limit=SOON)
        assert leaves(pair, job) == ["intended"]
        until(lambda: (pair.seen().answered_at or 0) > time.monotonic() - 1.0, limit=SOON)
        # Its standby is old: nobody dares to run it, however silent its host is.
        network.cut(pair.plan, "alpha", guests_too=True)
        refused = pair.run("failover", "web1")
        assert refused.code == 18, refused.err
        assert "had permission to run unprotected there" in refused.err
        time.sleep(12.0)  # nothing is done, longer than a dead host is waited for
        assert (pair.actions, pair.powered) == ([], True)
        assert pair.runs() == ["alpha"]
        # All is mended: it is brought up, and may run again.
        network.heal(pair.plan, "alpha")
        apart(pair, "del")
        until(lambda: leaves(pair, job) == ["done"], limit=2 * SOON)
        assert primary(pair)["phase"] == "protecting"
        network.cut(pair.plan, "alpha", guests_too=True)
        goes_on(pair, time.monotonic())
        assert lookout.two_copies() == []
    assert pair.actions == ["off", "status"]
    texts = [one["text"] for one in told]
    assert any("web1: it continues without beta" in text for text in texts)
    assert any("complete again" in text for text in texts)


@pytest.mark.long
def test_without_anybody_who_keeps_watch_output_waits_and_recover_lets_it_out(
    pair: Fencing,
) -> None:
    apart(pair, "replace")
    until(lambda: "waits for permission" in str(primary(pair).get("says")), limit=SOON)
    silent = pair.seen().answered_at
    time.sleep(3.0)  # nothing gets out
    assert pair.seen().answered_at == silent
    assert pair.runs() == ["alpha"]
    assert "now runs unprotected" in pair.good("recover").out
    until(lambda: (pair.seen().answered_at or 0) > time.monotonic() - 1.0, limit=SOON)
    apart(pair, "del")
    assert pair.ledgers() == WHOLE


@pytest.mark.long
def test_a_guest_whose_qemu_died_is_failed_over_and_nobody_is_powered_off(pair: Fencing) -> None:
    (copy,) = [one for one in Census(pair.plan).copies("web1") if one.host == "alpha"]
    with Lookout(pair.plan) as lookout, watching(pair) as told:
        os.kill(copy.pid, signal.SIGKILL)
        until(lambda: pair.runs(1.0) == ["beta"], limit=SOON)
        assert lookout.two_copies() == []
    assert (pair.actions, pair.powered) == ([], True)
    (done,) = [one for one in told if one["event"] == "failed over"]
    assert done["why"].startswith("alpha reports the guest as not running")
    assert pair.ledgers() == WHOLE


@pytest.mark.long
def test_a_service_that_is_killed_in_between_is_followed_by_the_next(pair: Fencing) -> None:
    pair.behaves("hangs")
    with Lookout(pair.plan) as lookout:
        first = pair.start("run")
        network.cut(pair.plan, "alpha", guests_too=True)
        until(lambda: "status" in pair.actions, limit=SOON)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        assert (pair.runs(), pair.powered) == ([], False)
        pair.behaves("works")
        with watching(pair):
            goes_on(pair, time.monotonic())
        assert lookout.two_copies() == []


@pytest.mark.long
def test_a_dead_backup_costs_seconds_of_output_and_not_the_guest(pair: Fencing) -> None:
    job = status(pair)["job"]
    with watching(pair):
        host.power_off(pair.plan.host("beta"))
        until(lambda: leaves(pair, job) == ["intended"], limit=SOON)
        until(lambda: (pair.seen().answered_at or 0) > time.monotonic() - 1.0, limit=SOON)
        assert pair.runs() == ["alpha"]
    pair.good("unprotect", "web1")
    assert pair.actions == []
    lab.heal(pair.plan, "beta")
    pair.good("unprotect", "web1")
    assert pair.copies() == ["alpha"]
