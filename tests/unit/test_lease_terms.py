"""For how long a lease is good, for its holder and for others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import BadInput
from vmckpt.lease import terms
from vmckpt.lease.terms import Terms
from vmckpt.units import Seconds


@st.composite
def kept(draw: st.DrawFn) -> Terms:
    ttl = Seconds(draw(st.floats(min_value=1, max_value=3600)))
    least = terms.least_margin(ttl)
    return Terms(ttl=ttl, margin=Seconds(draw(st.floats(min_value=least, max_value=ttl / 2))))


@given(
    terms_=kept(),
    sent=st.floats(min_value=0, max_value=1e6),
    way=st.floats(min_value=0, max_value=1e3),
    fast=st.floats(min_value=-terms.DRIFT, max_value=terms.DRIFT),
    slow=st.floats(min_value=-terms.DRIFT, max_value=terms.DRIFT),
    ahead=st.floats(min_value=-1e6, max_value=1e6),
)
def test_nobody_takes_over_before_the_guest_is_dead(
    terms_: Terms, sent: float, way: float, fast: float, slow: float, ahead: float
) -> None:
    """The renewal takes `way` to be written; the clocks run `fast` and `slow` beside true time,
    and the witness's is `ahead`."""
    dead = sent + terms_.lasts / (1 - abs(slow)) + terms.GUARD_TURN + terms.KILLED_IN
    written = sent + way
    passed = (dead - written) * (1 + fast)
    rest = terms.still_to_wait(written + ahead, written + ahead + passed, terms_)

    assert passed <= terms_.waits + 1e-6
    assert passed < 0 or rest == pytest.approx(terms_.waits - passed, abs=1e-6)


@given(terms_=kept(), sent=st.floats(min_value=0, max_value=1e6))
def test_several_renewals_may_fail_before_the_lease_is_lost(terms_: Terms, sent: float) -> None:
    fourth = Seconds(sent + 4 * terms_.every + terms_.limit * 0.9)

    assert terms.may_run(Seconds(sent), fourth, terms_)
    assert terms_.limit <= terms_.every


def test_the_guest_runs_until_its_lease_ends_and_others_wait_longer() -> None:
    agreed = Terms(ttl=Seconds(5.0), margin=Seconds(1.0))

    assert terms.may_run(Seconds(100.0), Seconds(104.0), agreed)
    assert not terms.may_run(Seconds(100.0), Seconds(104.1), agreed)
    assert terms.still_to_wait(100.0, 104.0, agreed) == pytest.approx(2.0)
    assert not terms.still_to_wait(100.0, 107.0, agreed)


def test_a_stamp_from_the_future_says_nothing() -> None:
    assert not terms.still_to_wait(3700.0, 100.0, Terms())


@pytest.mark.parametrize(
    ("ttl", "margin", "told"),
    [
        pytest.param(0.5, 0.2, "a lease of 500 ms is not possible", id="too short"),
        pytest.param(4000, 1, "between 1.0 s and an hour", id="too long"),
        pytest.param(float("nan"), 1, "is not possible", id="no number"),
        pytest.param(5, 0.1, "a margin of 100 ms does not fit", id="no time to kill"),
        pytest.param(5, 3, "does not fit a lease of 5.0 s; take between 155 ms", id="too wide"),
        pytest.param(3600, 1, "take between 3.8 s", id="the clocks drift"),
    ],
)
def test_terms_that_cannot_be_kept_are_refused(ttl: float, margin: float, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        Terms(ttl=Seconds(ttl), margin=Seconds(margin))
