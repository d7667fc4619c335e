"""What a watchdog must know is read as it was written, and nothing else is."""

import json

import pytest

from vmckpt.replication.watchdog.facts import Facts, Resumable
from vmckpt.replication.watchdog.rules import Rules

RESUMABLE = Resumable(
    guest="u-1", host="alpha", uri="", undo="{}", lock="/run/lock", logs=("/run/a", "/run/b")
)
FACTS = Facts(
    page="/run/page", qemu=77, command=("agent", "/run/x"), folder="/run/x", rules=Rules(),
    resumable=RESUMABLE, pair=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "facts", [FACTS, Facts(page="/run/page", qemu=77, command=("agent",), folder="/run/x")]
)
def test_it_is_read_as_it_was_written(facts: Facts) -> None:
    assert Facts.from_json(facts.to_json()) == facts


def test_what_an_older_agent_did_not_say_is_usual() -> None:
    told = json.loads(FACTS.to_json())
    for name in ("rules", "resumable", "pair"):
        del told[name]
    found = Facts.from_json(json.dumps(told))
    assert (found.rules, found.resumable, found.pair) == (Rules(), None, False)


TOLD = json.loads(FACTS.to_json())


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "7", '{"page": "/run/page"}', json.dumps({**TOLD, "x": 1}),
        json.dumps({**TOLD, "resumable": {"guest": "u-1"}}), json.dumps({**TOLD, "command": None}),
    ],
    ids=range(8),
)  # fmt: skip
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is all that is promised
        Facts.from_json(text)
