"""Snapshots that are brought to life to be proved, and taken away again."""

import signal
from pathlib import Path

import pytest

from tests.lab.bench import Bench, finish, first_line, until, uuid
from tests.lab.guest_agents import started
from tests.lab.snapshots import SMALL, left, taken
from vmckpt.hypervisor.guest_agent import GuestAgent
from vmckpt.hypervisor.qmp import QmpMonitor

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
def test_the_agent_that_answered_must_answer_in_the_copy(
    kept: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(kept, tmp_path, monkeypatch, stays=True)
    uri = kept.inventory.host("alpha").uri
    with QmpMonitor(uuid(kept), host="alpha", uri=uri) as monitor:
        until(GuestAgent(monitor).there)
    one = taken(kept).json
    done = kept.good(
        "snapshot", "verify", one["id"], "--boot", "--on", "beta", "--for", "20s", "--json"
    )
    (booted,) = done.json["booted"]
    assert (booted["lives"], booted["why"]) == (True, "its guest agent answers"), booted
    assert (strangers(kept), left(kept)) == ([], [])


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
