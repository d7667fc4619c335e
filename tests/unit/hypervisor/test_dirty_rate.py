import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.hypervisor.dirty_rate import point
from vmckpt.units import MIB, Bytes, Seconds


def test_few_pages_and_whole_numbers_make_it_rough() -> None:
    found = point(20, 1, Bytes(256 * MIB))

    assert found.time == Seconds(1.0)
    assert found.dirtied == 20 * MIB
    # 128 pages were looked at: measured in the lab at 20 MiB/s were 12 to 20.
    assert 8 * MIB < found.error < 16 * MIB


def test_more_memory_is_looked_at_more_closely() -> None:
    small, large = point(20, 1, Bytes(256 * MIB)), point(80, 1, Bytes(1024 * MIB))

    assert large.error / large.dirtied < small.error / small.dirtied


def test_longer_looks_round_more() -> None:
    assert point(0, 60, Bytes(64 * MIB)).error > 30 * MIB


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(16, 1 << 20))
def test_no_more_than_all_memory_is_written(rate: int, seconds: int, memory: int) -> None:
    found = point(rate, seconds, Bytes(memory * MIB))

    assert 0 <= found.dirtied <= memory * MIB
    assert found.error > 0


def test_nothing_seen_is_not_surely_nothing() -> None:
    found = point(0, 1, Bytes(256 * MIB))

    assert found.dirtied == 0
    assert found.error == pytest.approx(4.4 * MIB, rel=0.2)
