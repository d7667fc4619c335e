"""What a schedule's retention deletes, and what can never go."""

from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.make_store_v1 import secret
from tests.support.stocking import Stock, id_of, stocked
from vmckpt.errors import BadInput
from vmckpt.policy.model import Keep
from vmckpt.snapshot import prune
from vmckpt.snapshot.prune import PruneDecision, Survey
from vmckpt.store.keys.keyring import OwnKey

LAST = Keep(last=1)
NIGHTLY: dict[str, Any] = {"tags": {"schedule": "nightly"}}
STRANGER = OwnKey(secret("a stranger"))


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def surveyed(stock: Stock) -> Survey:
    return prune.survey(stock.store(), stock.ring.trusted())


def planned(found: Survey, keep: Keep = LAST) -> dict[str, PruneDecision]:
    told = prune.plan(found, keep, schedule="nightly", now=2e9, zone=UTC)
    return {one.id: one for one in told}


def test_only_what_the_schedule_made_can_go(stock: Stock) -> None:
    old, new = (stock.put(name, [1], **NIGHTLY) for name in ("old", "new"))
    by_hand, weekly = stock.put("hand", [1]), stock.put("w", [1], tags={"schedule": "weekly"})
    told = planned(surveyed(stock))

    assert {id_ for id_, one in told.items() if not one.stays} == {old}
    assert {new, by_hand, weekly} <= told.keys()


def test_what_cannot_be_read_or_has_an_unknown_writer_is_left_alone(stock: Stock) -> None:
    old, new = (stock.put(name, [1], **NIGHTLY) for name in ("old", "new"))
    foreign = stock.put("foreign", [1], signer=STRANGER, **NIGHTLY)
    broken = stock.put("broken", [1], **NIGHTLY)
    (stock.folder / "near/snapshots" / broken).write_bytes(b"x")
    found = surveyed(stock)
    told = planned(found)

    assert set(found.known) == {old, new}
    assert told[foreign].reasons == ("its writer is not trusted",)
    assert told[broken].reasons[0].startswith("cannot be read: ")
    assert told[foreign].stays
    assert told[broken].stays
    assert not told[old].stays  # those that nobody trusts take no place of good ones
    assert told[new].stays


def test_what_is_pinned_stays_also_if_that_happened_meanwhile(stock: Stock) -> None:
    first, second, _ = (stock.put(name, [1], **NIGHTLY) for name in ("a", "b", "c"))
    stock.store().pin(first)
    told = planned(surveyed(stock))
    assert (told[first].stays, told[second].stays) == (True, False)
    stock.store().pin(second)
    (done,) = prune.carry_out(stock.store(), told.values())

    assert (done.stays, done.deleted, done.reasons) == (True, False, ("pinned meanwhile",))
    assert len(stock.store().manifests()) == 3


def test_the_oldest_goes_first_and_who_was_quicker_is_no_error(stock: Stock) -> None:
    made = [stock.put(name, [1], **NIGHTLY) for name in ("a", "b", "c")]
    told = planned(surveyed(stock))
    stock.store().delete(made[1])
    done = list(prune.carry_out(stock.store(), told.values()))

    assert [(one.id, one.deleted) for one in done] == [(made[0], True), (made[1], False)]
    assert done[1].reasons == ("already deleted by another process",)
    assert done[0].as_json()["name"] == "a"


def test_without_a_rule_nothing_is_decided() -> None:
    with pytest.raises(BadInput, match="no retention rule was given"):
        planned(Survey(known={}, left={}, pins=frozenset()), Keep())


def test_a_schedule_must_be_named_unless_there_is_just_one(stock: Stock) -> None:
    with pytest.raises(BadInput, match="near has no snapshot"):
        prune.schedule_of(surveyed(stock), None, "near")
    stock.put("a", [1], **NIGHTLY)
    found = surveyed(stock)
    assert prune.schedule_of(found, None, "near") == "nightly"
    assert prune.schedule_of(found, "weekly", "near") == "weekly"
    public = replace(found.known[id_of("a")], tags={"schedule": "weekly"})
    both = replace(found, known={**found.known, "s-b": public})
    with pytest.raises(BadInput, match="has snapshots of several schedules: nightly, weekly"):
        prune.schedule_of(both, None, "near")
