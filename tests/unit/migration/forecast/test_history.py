from dataclasses import replace

import pytest

from vmckpt.journal.migration_history import PastMove
from vmckpt.migration.forecast import history
from vmckpt.model.migration import LinkSeen
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds


def move(
    *, total: float = 3.0, sent: float = 200, rate: float = 100, outcome: str = "completed",
    limit: int | None = None,
) -> PastMove:  # fmt: skip
    return PastMove(
        id="m-1", guest="web1", guest_uuid=None, source="alpha", target="beta", ended_at=0.0,
        outcome=outcome, mode="precopy", total=Seconds(total), setup=None, downtime=None,
        observed_downtime=None, transferred=Bytes(round(sent * MIB)),
        bandwidth=BytesPerSecond(round(rate * MIB)), dirty_rates=(), dirty_probes=(),
        limit=None if limit is None else BytesPerSecond(limit),
    )  # fmt: skip


def link(rate: float) -> LinkSeen:
    return LinkSeen(rate=BytesPerSecond(round(rate * MIB)), received=Bytes(1), lasted=Seconds(0.5))


def at(seen: LinkSeen | None, *past: PastMove) -> tuple[float, float]:
    found = history.bandwidth(seen, past, encrypted=False, connections=1)
    assert found.basis
    assert found.later.low == found.first.low
    assert found.later.high >= found.first.high
    return found.first.low / MIB, found.first.high / MIB


def test_a_narrow_link_decides() -> None:
    assert at(link(100)) == pytest.approx((96, 101.5), rel=0.001)


def test_a_wide_link_leaves_it_to_qemu() -> None:
    assert at(link(5000)) == pytest.approx((150, 1200), rel=0.001)


def test_a_link_about_as_wide_as_qemu_is_quick_may_be_either() -> None:
    assert at(link(400)) == pytest.approx((150, 406), rel=0.001)


def test_past_moves_show_what_qemu_manages() -> None:
    low, high = at(link(5000), move(total=4, sent=900, rate=500), move(total=4, sent=900, rate=600))

    assert (low, high) == pytest.approx((300, 840), rel=0.001)


def test_past_moves_that_filled_the_link_let_it_decide() -> None:
    assert at(link(400), move(sent=900, rate=390)) == pytest.approx((384, 406), rel=0.001)


@pytest.mark.parametrize(
    "past", [move(sent=120, rate=100), move(outcome="failed"), move(limit=100 * MIB)]
)
def test_moves_that_tell_nothing_are_left_out(past: PastMove) -> None:
    assert at(link(5000), past) == at(link(5000))


def test_without_a_measurement_past_moves_stand_in() -> None:
    low, high = at(None, move(rate=100))

    assert low < 100 < high < 200
    assert at(None)[0] < 20


def test_tls_and_more_connections_change_what_one_stream_manages() -> None:
    tls = history.stream((), encrypted=True, connections=1)[0]
    four = history.stream((), encrypted=False, connections=4)[0]

    assert tls.high == history.STREAM.high / 2
    assert four.high == history.STREAM.high * 4


def test_setting_up_is_what_is_left_of_past_moves() -> None:
    span, words = history.setup([move(total=2.5), move(total=2.7)])

    assert span.covers(0.5)
    assert span.covers(0.7)
    assert span.high < 1.2
    assert "2 past moves" in words


def test_one_move_alone_does_not_tell_how_long_setting_up_takes() -> None:
    assert history.setup([move()])[0] == history.SETUP


def test_what_agents_carried_says_nothing_of_qemus_stream() -> None:
    by_agents = replace(move(total=20.0, sent=600, rate=40), mode="checkpoint")

    told = history.stream((by_agents,), encrypted=False, connections=1)
    assert told[0] == history.STREAM


@pytest.mark.parametrize(
    ("seen", "past", "known"),
    [
        (link(5000), (), False),
        (link(400), (), False),
        (None, (), False),
        (link(100), (), True),
        (link(5000), (move(total=4, sent=900, rate=500),), True),
        (None, (move(total=4, sent=900, rate=500),), True),
        (link(5000), (move(sent=120, rate=100),), False),
        (link(5000), (move(outcome="failed"),), False),
    ],
)
def test_a_default_is_not_a_measurement(
    seen: LinkSeen | None, past: tuple[PastMove, ...], known: bool
) -> None:
    """75 MiB/s was assumed on a busy host, and the move took five times as long as forecast."""
    found = history.bandwidth(seen, past, encrypted=False, connections=1)

    assert found.known is known
    assert any("is unknown until a migration" in one for one in found.basis) is (
        not known and seen is not None
    )
