"""What is said of operations, and of names that nothing has."""

from pathlib import Path

import pytest

from vmckpt import inventory
from vmckpt.app import fleet
from vmckpt.errors import BadInput, at_host, meant
from vmckpt.journal import wording


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("wbe1", "did you mean web1?"),
        ("web", "did you mean web2 or web1?"),
        ("zebra", "run vmckpt guests"),
        ("", "run vmckpt guests"),
    ],
)
def test_a_misspelt_name_brings_those_that_are_nearly_it(word: str, said: str) -> None:
    assert meant(word, ["web1", "web2", "database"], "run vmckpt guests") in (
        said, said.replace("web2 or web1", "web1 or web2")
    )  # fmt: skip


def test_a_snapshot_of_a_misspelt_guest_names_the_likely_one() -> None:
    known = inventory.parse("hosts: {alpha: {uri: test:///default}}", Path("hosts.yaml"))

    with pytest.raises(BadInput, match="no guest 'web1' on alpha; run vmckpt guests"):
        fleet.host_of(known, "web1", ([], {}))


def test_a_host_is_named_once() -> None:
    assert at_host("alpha", "alpha: no answer in 5 s") == "alpha: no answer in 5 s"
    assert at_host("alpha", "no route") == "alpha: no route"
    assert at_host("alpha", "alphabet: no route") == "alpha: alphabet: no route"


def test_a_decision_is_shown_with_what_was_known_in_units() -> None:
    numbers = {"iteration": 2, "remaining": 60919808, "dirty_rate": None, "bandwidth": 47769708}
    values = {"action": "throttle", "reason": "it grows", "numbers": numbers}

    assert wording.event("decided", values) == (
        "decided throttle, because it grows iteration=2 remaining=58 MiB bandwidth=46 MiB/s"
    )
