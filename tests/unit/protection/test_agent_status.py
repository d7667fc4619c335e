"""What a host's answer about a protection says, and what it does not say."""

from typing import Any

import pytest

from vmckpt.protection.agent_status import ProtectionStatus, parse_answer


def test_what_is_not_said_is_unknown_and_no_false() -> None:
    found = parse_answer({})
    assert (found.runs, found.agent, found.moves, found.role) == (None, None, None, None)
    assert not (found.ready)
    assert not (found.connected)
    assert not (found.given)
    assert not (found.libvirt_silent)
    assert parse_answer({"runs": False, "moves": False}) == ProtectionStatus(
        runs=False, moves=False
    )


@pytest.mark.parametrize(
    ("told", "nothing"),
    [
        ({"role": None, "runs": True, "known": True}, True),
        ({"role": "backup"}, False),
        ({"error": "no answer", "silent": True}, False),
    ],
)
def test_only_who_answers_can_know_nothing(told: dict[str, Any], nothing: bool) -> None:
    assert parse_answer(told).knows_nothing is nothing


@pytest.mark.parametrize(
    ("told", "known", "silent"),
    [
        ({"known": True}, True, False), ({"known": False}, False, False),
        ({"known": None}, False, True), ({}, False, False),
    ],
)  # fmt: skip
def test_a_libvirt_that_does_not_answer_is_told_from_one_that_knows_no_such_guest(
    told: dict[str, Any], known: bool, silent: bool
) -> None:
    found = parse_answer({"role": None, **told})
    assert (found.known, found.libvirt_silent) == (known, silent)


def test_times_and_marks_have_names_of_their_own() -> None:
    found = parse_answer({"silent_s": 2.5, "epoch_age_s": 0.5, "given": {"epoch": 7}})
    assert (found.silent_for, found.epoch_age, found.given) == (2.5, 0.5, True)
    assert found.told["given"] == {"epoch": 7}
