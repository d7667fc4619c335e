"""Protected guests whose journal is lost: what docs/recovery.md says about them holds."""

import os
import time
from collections.abc import Iterator

import pytest

from tests.lab.bench import WHOLE, Bench, until
from tests.lab.protecting import (
    GUEST,
    SOON,
    epochs,
    lab_with_witness,
    left,
    protect,
    stored,
    tidied,
)
from vmckpt_lab import host

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"lj{os.getpid()}") as made:
        yield made


@pytest.fixture
def pair(witnessed: Bench) -> Iterator[Bench]:
    with tidied(witnessed) as made:
        yield made


def lose_journal(bench: Bench) -> None:
    """As somebody does it who moves a damaged one away."""
    for path in (bench.plan.folder / "state").glob("journal.db*"):
        path.unlink()


def test_a_protection_is_ended_by_what_its_hosts_say(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    epochs(pair)
    lose_journal(pair)
    assert pair.good("status", "--json").json == []
    epochs(pair)  # its agents go on
    refused = pair.run("protect", "web1", "--to", "beta")
    assert "beta already has a standby of web1" in refused.err
    assert "unprotect web1; add --lost-journal if no journal records it" in refused.err
    assert "web1 is not protected" in pair.run("unprotect", "web1").err
    done = pair.good("unprotect", "web1", "--lost-journal")
    assert (
        "no record of web1's protection; recording it as its agents report it, from alpha to beta"
        in done.err
    )
    assert pair.where() == ["alpha"]
    assert left(pair) == []
    assert stored(pair, "alpha") == ["web1"]
    # Its lease is given back: the next protection begins one.
    protect(pair)
    epochs(pair)
    pair.good("failover", "web1", "--planned")
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE


def test_a_standby_runs_by_a_persons_word(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair, automatic=False)
    epochs(pair)
    lose_journal(pair)
    host.power_off(pair.plan.host("alpha"))
    refused = pair.run("unprotect", "web1", "--lost-journal")
    assert refused.code == 18
    assert "vmckpt failover web1 --host-is-off --lost-journal" in refused.err
    began = time.monotonic()
    pair.good("failover", "web1", "--host-is-off", "--lost-journal")
    until(lambda: (pair.seen().answered_at or 0) > began, limit=SOON)
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE
