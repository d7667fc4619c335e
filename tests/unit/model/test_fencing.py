"""What the answers of fence agents mean, and what they are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.model import fencing
from vmckpt.model.fencing import Action, FenceDevice, FenceTopology, Power, Ran, Step, Tried
from vmckpt.units import Seconds

LIMIT = Seconds(15.0)
SOON, LATE = Seconds(1.0), Seconds(31.0)
Code = int | str | None
"""None: it was not asked; a word: it had no end."""


def ran(status: Code) -> Ran | None:
    if status is None:
        return None
    return Ran(status if isinstance(status, int) else None, LIMIT)


def decided(
    off: Code, status: Code, waited: Seconds, *, answers: bool | None = False
) -> fencing.Decision:
    """Of a host with one device, asked at most once for each action."""
    answered, looked = ran(off), ran(status)
    tried = Tried(
        off=() if answered is None else (answered,), looks=() if looked is None else (looked,),
        host_answers=answers,
    )  # fmt: skip
    return fencing.decide(FenceTopology(((device(),),)), [tried], waited)


STORIES = [
    ("nothing is known yet", None, None, SOON, Step.SWITCH_OFF, ""),
    (
        "off failed",
        1,
        None,
        SOON,
        Step.REFUSE,
        "could not be switched off: the fence agent exited with 1",
    ),
    ("an interpreter that fails", 2, None, SOON, Step.REFUSE, "the fence agent exited with 2"),
    (
        "off had no end",
        "hung",
        None,
        SOON,
        Step.REFUSE,
        "could not be switched off: no answer within 15",
    ),
    ("off was killed", -9, None, SOON, Step.REFUSE, "the fence agent was killed by signal 9"),
    ("off says it worked", 0, None, SOON, Step.LOOK, ""),
    ("off at once", 0, 2, SOON, Step.OFF, ""),
    ("off at last", 0, 2, LATE, Step.OFF, ""),
    ("on yet", 0, 0, SOON, Step.LOOK, ""),
    ("on for ever", 0, 0, LATE, Step.REFUSE, "still reports that the power is on"),
    ("unknown yet", 0, 1, SOON, Step.LOOK, ""),
    (
        "unknown for ever",
        0,
        1,
        LATE,
        Step.REFUSE,
        "power state is unknown: the fence agent exited with 1",
    ),
    ("a status that dies", 0, -11, LATE, Step.REFUSE, "the fence agent was killed by signal 11"),
    ("a status without an end", 0, "hung", SOON, Step.LOOK, ""),
    ("never an answer", 0, "hung", LATE, Step.REFUSE, "state is unknown: no answer within 15"),
    (
        "a code nobody knows",
        0,
        3,
        LATE,
        Step.REFUSE,
        "power state is unknown: the fence agent exited with 3",
    ),
]


@pytest.mark.parametrize(
    ("off", "status", "waited", "step", "why"),
    [story[1:] for story in STORIES],
    ids=[story[0] for story in STORIES],
)
def test_what_is_done_next(off: Code, status: Code, waited: Seconds, step: Step, why: str) -> None:
    found = decided(off, status, waited)
    assert found.step is step
    assert why in found.why
    assert found.why == "" or found.why.startswith("fence_fake: ")


def test_a_host_that_answers_is_not_off() -> None:
    found = decided(0, 2, SOON, answers=True)
    assert found.step is Step.REFUSE
    assert "still answers: the device controls another machine" in found.why


@given(
    off=st.none() | st.integers(-64, 255) | st.just("hung"),
    status=st.none() | st.integers(-64, 255) | st.just("hung"),
    waited=st.floats(0, 1e6),
)
def test_only_a_good_off_and_then_a_status_of_2_is_off(
    off: Code, status: Code, waited: float
) -> None:
    found = decided(off, status, Seconds(waited))
    assert (found.step is Step.OFF) == ((off, status) == (0, 2))


@pytest.mark.parametrize(
    ("code", "told"), [(0, Power.ON), (2, Power.OFF), (1, Power.UNKNOWN), (None, Power.UNKNOWN)]
)
def test_what_a_status_means(code: int | None, told: Power) -> None:
    assert fencing.power(Ran(code, LIMIT)) is told


def device(**options: str) -> FenceDevice:
    return FenceDevice(agent="fence_fake", options=options)


def test_an_agent_reads_its_options_and_last_what_is_asked() -> None:
    found = fencing.told(device(ip="10.9.0.11", username="ad=min"), Action.OFF, "pa ss")
    assert found == b"ip=10.9.0.11\nusername=ad=min\npassword=pa ss\naction=off\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("password", "a\naction=on"), ("password", "a\r"), ("password", "a\0"), ("password", ""),
        ("password", " s3cret"), ("password", "a\u2028b"), ("password", 7), ("password", None),
        ("action", "on"), ("ACTION", "on"), ("option", "on"), ("a b", "c"), ("#a", "c"),
        ("a=b", "c"), ("a\nb", "c"), ("", "c"),
    ],
)  # fmt: skip
def test_what_would_be_another_line_is_refused_and_not_told(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot be set|invalid option name") as caught:
        fencing.check_option(name, value)
    if isinstance(value, str) and name == "password" and value:
        assert value not in str(caught.value)


def test_only_the_words_that_all_agents_have_are_told() -> None:
    text = "2026 ERROR: Unable to connect/login to fencing device hunter2\n\nhunter2\n"
    assert fencing.known_words(text) == "Unable to connect/login to fencing device"
    assert fencing.known_words("hunter2") is None


def test_the_options_are_not_shown_by_accident() -> None:
    assert "hunter2" not in repr(device(password="hunter2"))
