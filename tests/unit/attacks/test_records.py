"""Traces and stored orders in which a value is not what it should be."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.run import CORPUS, FINDINGS
from vmckpt.errors import BadInput
from vmckpt.migration import replay, trace
from vmckpt.model.migration import AutoConverge, Driver, MoveOrder
from vmckpt.policy import loader
from vmckpt.units import GIB, Bytes, BytesPerSecond

LINES = (CORPUS / "trace" / "whole").read_text().splitlines()
ODD: list[Any] = [None, -1, 10**30, 1e308, "x", [], {}, True, [[]], "\x1b"]
ORDER = MoveOrder(
    driver=Driver.PEER_TO_PEER, persistent=True, autostart=False, storage_proven=True,
    bandwidth=BytesPerSecond(GIB), auto_converge=AutoConverge(initial=1, increment=2, at_most=3),
    xbzrle_cache=Bytes(GIB), copied_disks=("vda", "vdb"), tls_name="beta", connections=4,
)  # fmt: skip


def replay_under_all(text: str) -> None:
    recorded = trace.parse(text.splitlines(), "t")
    for policy in loader.load_all(None):
        json.dumps(replay.under(policy, recorded).as_json(), allow_nan=False)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000, '{"a":' * 100_000, "NaN", '{"sample": {"at_ms": NaN}}', "9" * 5000,
        '{"outcome": []}', '"trace"', "7", "null", '{"trace": ' + "[" * 900 + "]" * 900 + "}",
        "\x00", "{}{}", '{"sample": ' + LINES[1].split(":", 1)[1].replace("500,", "1e999,", 1),
    ],
    ids=range(13),
)  # fmt: skip
def test_a_hostile_line_is_told_with_its_number(line: str) -> None:
    with pytest.raises(BadInput, match="t:2: not a valid line of a trace") as caught:
        trace.parse([LINES[0], line, *LINES[1:]], "t")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("number", [0, 1, -2])
def test_any_value_of_a_trace_may_be_odd(odd: Any, number: int) -> None:
    outer = json.loads(LINES[number])
    inner = outer if number == 0 else next(iter(outer.values()))
    for key in list(inner):
        before, inner[key] = inner[key], odd
        lines = list(LINES)
        lines[number] = json.dumps(outer)
        inner[key] = before
        told = ""
        try:
            trace.parse(lines, "t")
        except BadInput as exc:
            told = str(exc)
        assert "\n" not in told


def test_time_in_a_trace_never_goes_backwards() -> None:
    with pytest.raises(BadInput, match="time goes backwards"):
        trace.parse([LINES[0], LINES[2], LINES[1]], "t")


def test_a_trace_that_sends_for_ever_can_be_replayed() -> None:
    replay_under_all((FINDINGS / "trace" / "sends-for-ever").read_text())


def test_a_large_file_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_BYTES", 1 << 20)
    path = tmp_path / "t.jsonl"
    path.write_text("{}\n" * (1 << 19))

    with pytest.raises(BadInput, match="the file exceeds 1 MiB and is not a valid trace"):
        trace.read(path)


def test_an_order_comes_back_as_it_was() -> None:
    assert MoveOrder.from_json(json.loads(json.dumps(ORDER.as_json()))) == ORDER


@pytest.mark.parametrize("odd", [*ODD, "vda", 7.5, ["x", 1]], ids=range(len(ODD) + 3))
def test_an_order_with_a_wrong_value_is_none(odd: Any) -> None:
    stored = ORDER.as_json()
    for key, before in stored.items():
        changed = {**stored, key: odd}
        try:
            order = MoveOrder.from_json(changed)
        except (TypeError, KeyError, ValueError):
            continue
        # What is taken is of the kind that was there, or the nothing that may be.
        value = getattr(order, key)
        assert value is None or isinstance(value, type(before) | tuple | str), (key, odd)
        assert not isinstance(value, bool) or isinstance(before, bool), (key, odd)


@pytest.mark.parametrize("stored", [None, [], "x", 7, {}, {"auto_converge": 7}, {"x": 1}])
def test_what_is_no_order_is_none(stored: Any) -> None:
    with pytest.raises((TypeError, KeyError, ValueError)):
        MoveOrder.from_json(stored)


@settings(max_examples=60)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(sorted(ORDER.as_json())), inner, max_size=5)))  # fmt: skip
def test_any_json_is_an_order_or_none(stored: Any) -> None:
    base = ORDER.as_json()
    changed = {**base, **stored} if isinstance(stored, dict) else stored
    try:
        order = MoveOrder.from_json(changed)
    except (TypeError, KeyError, ValueError):
        return
    assert all(isinstance(disk, str) for disk in order.copied_disks)
    assert isinstance(order.live, bool)
