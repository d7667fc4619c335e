"""Hosts with several fence devices: which one is asked next, and when the host is off."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.model import fencing
from vmckpt.model.fencing import FenceDevice, FenceTopology, Ran, Step, Tried
from vmckpt.units import Seconds

LIMIT = Seconds(15.0)
Answers = Sequence[int | None]
"""A device's answers to one action, in turn; the last one is repeated. None: it had no end."""


def topology(*sizes: int) -> FenceTopology:
    """Levels of that many devices; the agents are called a, b, c and so on."""
    names = iter("abcdefghi")
    return FenceTopology(
        tuple(
            tuple(FenceDevice(agent=next(names), options={}) for _ in range(size)) for size in sizes
        )
    )


def story(
    levels: FenceTopology, offs: Mapping[str, int | None], looks: Mapping[str, Answers],
    *, host_answers: Sequence[bool] = (False,), turn: float = 11.0,
) -> tuple[list[str], fencing.Decision]:  # fmt: skip
    """Carry decisions out with such answers: what was done in turn, and the last decision.

    `offs`: 0 unless said; `looks`: off (2) unless said; each look takes `turn` seconds.
    """
    did: list[str] = []
    tried, waited = [Tried()], 0.0
    asked: dict[str, int] = {}
    while len(did) < 100:
        found = fencing.decide(levels, tried, Seconds(waited))
        last = tried[-1]
        agent = levels.levels[len(tried) - 1][found.number].agent
        match found.step:
            case Step.SWITCH_OFF:
                did.append(f"off {agent}")
                off = (*last.off, Ran(offs.get(agent, 0), LIMIT))
                tried[-1] = Tried(off, last.looks)
                waited = 0.0
            case Step.LOOK:
                did.append(f"look {agent}")
                answers, number = looks.get(agent, [2]), asked.get(agent, 0)
                asked[agent] = number + 1
                answer = Ran(answers[min(number, len(answers) - 1)], LIMIT)
                tried[-1] = Tried(last.off, (*last.looks, answer))
                waited += turn
            case Step.KNOCK:
                did.append("knock")
                tried[-1] = Tried(
                    last.off, last.looks, host_answers[min(len(tried), len(host_answers)) - 1]
                )
            case Step.NEXT_LEVEL:
                did.append("next")
                tried.append(Tried())
            case Step.OFF | Step.REFUSE:
                return did, found
    raise AssertionError(f"it does not end: {did}")


TWO_OFF = ["off a", "off b", "look a", "look b"]


def test_all_supplies_are_switched_off_and_then_all_are_looked_at() -> None:
    did, found = story(topology(2), {}, {})
    assert did == [*TWO_OFF, "knock"]
    assert found.step is Step.OFF


def test_a_supply_that_cannot_be_switched_off_ends_its_level() -> None:
    did, found = story(topology(3), {"b": 1}, {})
    assert did == ["off a", "off b"]
    assert found.step is Step.REFUSE
    assert found.why == (
        "b (device 2 of 3): the host could not be switched off: the fence agent exited with 1"
    )


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([0], "the device acknowledged the power-off, but still reports that the power is on"),
        ([1], "the power state is unknown: the fence agent exited with 1"),
        ([None], "the power state is unknown: no answer within 15.0 s"),
    ],
)
@pytest.mark.parametrize("device", ["a", "b"])
def test_one_supply_that_is_not_off_is_enough_for_a_refusal(
    device: str, answers: Answers, why: str
) -> None:
    did, found = story(topology(2), {}, {device: answers})
    assert found.step is Step.REFUSE
    assert found.why.startswith(f"{device} (device {'ab'.index(device) + 1} of 2): {why}")
    assert did == [*TWO_OFF, "look a", "look b"]


def test_a_supply_that_is_late_is_waited_for_and_all_are_asked_again() -> None:
    did, found = story(topology(2), {}, {"b": [0, 2]}, turn=1.0)
    assert did == [*TWO_OFF, "look a", "look b", "knock"]
    assert found.step is Step.OFF


def test_a_supply_that_is_on_again_means_not_fenced() -> None:
    """It was off while the other one was still on: the host has never been without power."""
    did, found = story(topology(2), {}, {"a": [2, 0, 2], "b": [0, 2]}, turn=1.0)
    assert did == [*TWO_OFF, "look a", "look b"]
    assert found.step is Step.REFUSE
    assert found.why == "a (device 1 of 2): the device was off and is on again"


def test_a_supply_that_is_unknown_once_may_be_off_later() -> None:
    did, found = story(topology(2), {}, {"a": [2, 1, 2], "b": [1, 1, 2]}, turn=1.0)
    assert did == [*TWO_OFF, "look a", "look b", "look a", "look b", "knock"]
    assert found.step is Step.OFF


def test_levels_are_tried_in_turn_and_nothing_of_one_counts_in_the_next() -> None:
    did, found = story(topology(1, 2), {"a": 1}, {})
    assert did == ["off a", "next", "off b", "off c", "look b", "look c", "knock"]
    assert found.step is Step.OFF


def test_a_level_after_one_that_succeeded_is_not_tried() -> None:
    did, found = story(topology(1, 2), {}, {})
    assert did == ["off a", "look a", "knock"]
    assert found.step is Step.OFF


def test_a_level_about_another_machine_leads_to_the_next() -> None:
    did, found = story(topology(1, 1), {}, {}, host_answers=(True, False))
    assert did == ["off a", "look a", "knock", "next", "off b", "look b", "knock"]
    assert found.step is Step.OFF


def test_where_all_levels_fail_each_reason_is_told() -> None:
    did, found = story(topology(1, 2, 1), {"a": 1, "d": None}, {"c": [0]})
    assert did[-1] == "off d"
    assert found.step is Step.REFUSE
    assert found.why == (
        "a (level 1): the host could not be switched off: the fence agent exited with 1, and c"
        " (level 2, device 2 of 2): the device acknowledged the power-off, but still reports"
        " that the power is on, and d (level 3): the host could not be switched off: no answer"
        " within 15.0 s"
    )


CODES = st.sampled_from([0, 1, 2, 3, -9, None])


@given(data=st.data(), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_off_is_said_only_of_a_level_whose_devices_all_said_it_last(
    data: st.DataObject, sizes: list[int]
) -> None:
    levels = topology(*sizes)
    agents = [one.agent for level in levels.levels for one in level]
    offs = {one: data.draw(CODES) for one in agents}
    looks = {one: data.draw(st.lists(CODES, min_size=1, max_size=4)) for one in agents}
    answers = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    did, found = story(levels, offs, looks, host_answers=answers)
    if found.step is not Step.OFF:
        return
    number = did.count("next")
    those = [one.agent for one in levels.levels[number]]
    here = did[len(did) - did[::-1].index("next") :] if number else did
    assert all(offs[one] == 0 for one in those)
    assert answers[number] is False
    # The last round is whole, comes after the last off, and each device said off in it.
    assert here[-len(those) - 1 :] == [*(f"look {one}" for one in those), "knock"]
    for one in those:
        count = here.count(f"look {one}")
        assert looks[one][min(count, len(looks[one])) - 1] == 2
