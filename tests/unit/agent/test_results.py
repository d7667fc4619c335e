"""What an agent answers at the end: the same on both ends, and never nonsense."""

import json
from typing import Any

import pytest

from vmckpt.agent.results import TEXT, TEXTS, CreateResult, RestoreResult
from vmckpt.units import Bytes, Seconds

MADE = CreateResult(
    pause=Seconds(0.5), way="background", why="it works", phases={"freeze": Seconds(0.1)},
    held=Seconds(0.25), took=Seconds(2.0), read=Bytes(7), same=Bytes(3), zero=Bytes(2),
    written=Bytes(4), warnings=("slow",),
)  # fmt: skip
BACK = RestoreResult(
    disks=Seconds(1.0), memory=Seconds(2.0), took=Seconds(3.0), warnings=("slow",), whole=False
)


@pytest.mark.parametrize("result", [MADE, BACK])
def test_what_one_end_says_the_other_hears(result: CreateResult | RestoreResult) -> None:
    assert type(result).parse(json.loads(json.dumps(result.as_json()))) == result


def test_an_older_agent_says_less() -> None:
    told = MADE.as_json()
    del told["held"]
    assert CreateResult.parse({**told, "warnings": []}).held is None
    assert RestoreResult.parse({"disks": 1, "memory": 2, "took": 3}).whole


@pytest.mark.parametrize(
    "wrong",
    [
        {"pause": -1}, {"took": "long"}, {"read": True}, {"written": 1 << 63}, {"zero": None},
        {"phases": [1]}, {"warnings": "none"}, {"same": float("nan")},
    ],
)  # fmt: skip
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        CreateResult.parse({**json.loads(json.dumps(MADE.as_json())), **wrong})


def test_no_more_is_heard_than_can_be_read() -> None:
    told = {**BACK.as_json(), "warnings": ["x" * 10_000] * 1_000}
    heard = RestoreResult.parse(told).warnings
    assert (len(heard), len(heard[0])) == (TEXTS, TEXT)
