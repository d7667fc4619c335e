"""The best moment for post-copy: scenarios, and properties of the comparison."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.run.switch_moment import Ending, Network, PassNow, best_now, endings
from vmckpt.policy.model import SwitchCost
from vmckpt.units import MIB, Seconds

MEMORY = 256.0 * MIB
LINK = Network(precopy=23.8 * MIB, postcopy=23.8 * MIB)
DOWNTIME = Seconds(0.3)
USUAL = SwitchCost()


def writer(region: float, rate: float) -> DirtyCurve:
    """Rewrites a region of so many MiB at so many MiB/s."""
    full = region / rate
    return DirtyCurve(((full, region * MIB), (2 * full, region * MIB)), MEMORY)


def in_pass(size: float, left: float | None = None, elapsed: float = 0.0) -> PassNow:
    rest = size if left is None else left
    return PassNow(size=size * MIB, left=rest * MIB, elapsed=Seconds(elapsed))


def best(
    curve: DirtyCurve, here: PassNow, weights: SwitchCost = USUAL, network: Network = LINK
) -> Ending | None:
    return best_now(curve, here, network, DOWNTIME, weights)


HOT, MIDDLING, QUIET = writer(150, 100), writer(64, 20), writer(16, 1)


def test_a_guest_that_rewrites_most_of_its_memory_is_switched_in_the_first_second() -> None:
    waited = next(
        t / 10 for t in range(60)
        if best(HOT, in_pass(240, 240 - 23.8 * t / 10, t / 10)) is not None
    )  # fmt: skip

    assert waited < 1.0


def test_the_first_moments_of_a_pass_cost_nothing() -> None:
    """Nothing was sent yet that could be written again; and post-copy gets shorter."""
    now, later, *_ = endings(writer(64, 20), in_pass(160), LINK, DOWNTIME)

    assert later.total == pytest.approx(now.total, rel=0.03)
    assert later.postcopy < 0.95 * now.postcopy


def test_a_guest_that_rewrites_a_part_is_switched_before_it_is_all_sent_twice() -> None:
    assert best(MIDDLING, in_pass(160)) is None
    # The second pass would send all of it once more, and the third.
    assert best(MIDDLING, in_pass(64, 45, 0.84)) is not None


def test_a_guest_that_converges_is_never_switched() -> None:
    for left in range(240, 0, -10):
        assert best(QUIET, in_pass(240, left, (240 - left) / 23.8)) is None
    *_, last = endings(QUIET, in_pass(240), LINK, DOWNTIME)
    assert last.postcopy == pytest.approx(0)
    assert last.lost <= DOWNTIME


def test_the_weights_decide() -> None:
    afraid = SwitchCost(total_time=1.0, postcopy_time=5.0, lost_work=0.5)
    here = in_pass(240, 216, 1.0)

    assert best(HOT, here) is not None
    assert best(HOT, here, afraid) is None
    # At the end, too: where pre-copy never converges, there is no way around post-copy.
    assert any(best(HOT, in_pass(150, left, (150 - left) / 23.8), afraid) for left in range(150))


def test_lost_work_counts_pages_that_the_guest_writes_and_the_target_lacks() -> None:
    early, *_ = endings(MIDDLING, in_pass(240), LINK, DOWNTIME)
    late, *_ = endings(MIDDLING, in_pass(240, 0, 10.0), LINK, DOWNTIME)

    assert early.lost == pytest.approx(64 / 23.8, rel=0.01)
    assert late.lost == pytest.approx(64 / 23.8, rel=0.01)
    assert late.postcopy == pytest.approx(64 / 23.8, rel=0.01)
    assert early.postcopy == pytest.approx(240 / 23.8, rel=0.01)


def test_slow_post_copy_is_worth_more_waiting() -> None:
    slow = Network(precopy=23.8 * MIB, postcopy=8 * MIB)
    here = in_pass(240, 228, 0.5)

    assert best(HOT, here) is not None
    assert best(HOT, here, network=slow) is None


_weight = st.floats(0.0, 10.0)


@given(
    st.floats(1, 250), st.floats(0.1, 500), st.floats(1, 256), st.floats(0, 1), st.floats(1, 1000),
    _weight, _weight,
)  # fmt: skip
def test_what_is_chosen_is_the_cheapest_of_all(
    region: float, rate: float, size: float, part: float, link: float, post: float, lost: float
) -> None:
    curve, network = writer(region, rate), Network(precopy=link * MIB, postcopy=link * MIB)
    weights = SwitchCost(total_time=1.0, postcopy_time=post, lost_work=lost)
    here = in_pass(size, size * part, size * (1 - part) / link)
    found = list(endings(curve, here, network, DOWNTIME))
    costs = [one.cost(weights) for one in found]

    assert all(0 <= one.postcopy <= one.total + 1e-9 for one in found)
    assert all(one.lost <= one.postcopy + DOWNTIME + 1e-9 for one in found)
    assert (best(curve, here, weights, network) is not None) == (0.95 * costs[0] <= min(costs))
