"""Snapshots that are brought to life to be proved, and taken away again."""

import signal
from pathlib import Path

import pytest

from tests.lab.bench import Bench, finish, first_line
from tests.lab.snapshots import SMALL, left, taken

WHOLE = {"memory": True, "disk": True, "output": True}


def strangers(bench: Bench, on: str = "beta") -> list[str]:
    """What of a proof is left."""
    guests = bench.inside(on, "virsh", "list", "--all", "--name").split()
    files = [path.name for path in Path(bench.plan.shared).rglob("proof-*")]
    return guests + files


@pytest.mark.long
def test_a_snapshot_is_seen_to_live_beside_its_guest(kept: Bench) -> None:
    kept.guest(**SMALL)
    one = taken(kept).json
    done = kept.good(
        "snapshot", "verify", one["id"], "--boot", "--on", "beta", "--for", "3s", "--json"
    )
    (booted,) = done.json["booted"]
    assert (booted["lives"], booted["host"]) == (True, "beta"), booted
    assert (strangers(kept), left(kept)) == ([], [])
    assert kept.ledgers() == WHOLE


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_proof_that_is_broken_off_leaves_nothing(kept: Bench, how: signal.Signals) -> None:
    kept.guest(**SMALL)
    one = taken(kept).json
    proving = kept.start("snapshot", "verify", one["id"], "--boot", "--on", "beta", "--for", "60s")
    first_line(proving, "it has no network")
    assert strangers(kept) != []
    proving.send_signal(how)
    done = finish(proving)
    if how is signal.SIGINT:
        assert done.code == 130, done.err
    else:
        assert [told["kind"] for told in kept.good("recover", "--json").json] == ["proof"]
    assert (strangers(kept), left(kept)) == ([], [])
    assert kept.good("recover", "--json").json == []
    assert kept.ledgers() == WHOLE
