"""The source's end of a migration by epochs: what an order to end it does there."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.replicas import session
from vmckpt.agent.orders import ReplicaOrder
from vmckpt.agent.replication import handover, mirrors, orders, teardown

SESSION = session(moves=True, disks=())


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in this order; the guest's folder is `tmp_path`."""
    events: list[str] = []

    def end_primary(order: ReplicaOrder, _: object) -> list[str]:
        assert handover.handover_record(tmp_path) is None
        events.append("the guest runs on")
        assert order.define
        return ["ended its mirrors"]

    def note(what: str) -> Any:
        return lambda *_: events.append(what)

    SESSION.write(tmp_path)
    monkeypatch.setattr(orders, "folder_of", lambda _: tmp_path)
    monkeypatch.setattr(orders, "_stop_agent", note("agent ended"))
    monkeypatch.setattr(orders, "_end_primary", end_primary)
    monkeypatch.setattr(handover, "finish", note("QEMU ended"))
    monkeypatch.setattr(mirrors, "end_all", note("logs ended"))
    monkeypatch.setattr(teardown, "forget", note("forgotten"))
    return events


def end(**more: Any) -> dict[str, Any]:
    order = ReplicaOrder(
        what="end", guest=SESSION.guest, uri=SESSION.uri, host="alpha", owner=SESSION.session,
        **more,
    )  # fmt: skip
    return orders._end(order)


def give(folder: Path) -> None:
    (folder / "given.json").write_text(json.dumps({"stood_s": 0.1, "owners": {}}))


def test_a_guest_that_was_not_given_away_runs_on(done: list[str]) -> None:
    assert end() == {"did": ["ended its mirrors"]}
    assert done == ["agent ended", "the guest runs on"]


def test_one_that_was_is_left_as_it_is_and_said_to_be_given(
    done: list[str], tmp_path: Path
) -> None:
    give(tmp_path)
    assert end() == {"did": [], "given": True}
    assert done == ["agent ended"]
    assert handover.handover_record(tmp_path) is not None


def test_once_it_runs_there_its_qemu_ends_and_all_is_forgotten(
    done: list[str], tmp_path: Path
) -> None:
    give(tmp_path)
    assert end(define=False, standby_gone=True)["given"]
    assert done == ["agent ended", "QEMU ended", "logs ended", "forgotten"]


def test_what_the_target_could_not_take_is_taken_back(done: list[str], tmp_path: Path) -> None:
    give(tmp_path)
    assert end(standby_gone=True) == {"did": ["ended its mirrors"]}
    assert done == ["agent ended", "the guest runs on"]


def test_another_session_s_is_not_touched(done: list[str]) -> None:
    order = ReplicaOrder(what="end", guest=SESSION.guest, uri="", host="alpha", owner="other")
    assert orders._end(order) == {"did": []}
    assert done == []


def test_what_was_given_away_is_told_by_whoever_asks(done: list[str], tmp_path: Path) -> None:
    del done
    give(tmp_path)
    order = ReplicaOrder(what="ask", guest=SESSION.guest, uri="", host="alpha")
    assert orders._ask(order)["given"] == {"stood_s": 0.1, "owners": {}}
