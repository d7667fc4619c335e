"""What a forecast needs is read out of what was measured on a host."""

import pytest

from vmckpt.remote import measure
from vmckpt.units import MIB, Bytes


def test_the_answer_is_scaled_to_the_guest() -> None:
    answer = {
        "samples": 8, "used": "11000011", "resident": 6, "points": [[0.5, 2, 1], [1.0, 4, 3]],
    }  # fmt: skip

    seen = measure.memory_seen(answer, Bytes(64 * MIB))

    assert seen.in_use == 32 * MIB
    assert seen.resident == 48 * MIB
    assert [one.dirtied for one in seen.dirtied] == [16 * MIB, 32 * MIB]
    assert seen.dirtied[0].error < seen.dirtied[1].error
    assert list(seen.tail[0]) == [8.0 * MIB, 8.0 * MIB]
    assert list(seen.tail[-1]) == [64.0 * MIB, 32.0 * MIB]


def test_the_beginning_of_a_link_is_left_out() -> None:
    # A bucket of 100 at once, then 10 in each tenth of a second.
    marks = [(i / 10, 100 + 10 * i) for i in range(11)]

    seen = measure.link_seen(marks)

    assert seen is not None
    assert seen.rate == 100
    assert seen.received == 200
    assert measure.link_seen([(0.0, 1)]) is None
    # It stalled, and all that was left came in one piece right before the end.
    assert measure.link_seen([(0.0, 65536), (0.05, 3000), (0.60, 4000), (0.61, 4000)]) is None


@pytest.mark.parametrize("when", [0.19, 0.25, 0.4, 0.49])
def test_a_backlog_of_a_receiver_that_waited_for_a_cpu_is_not_the_links_rate(when: float) -> None:
    marks = [(0.01 * i, 120_000 * i + (700_000 if 0.01 * i > when else 0)) for i in range(51)]

    seen = measure.link_seen(marks)

    assert seen is not None
    assert seen.rate == pytest.approx(12_000_000, rel=0.03)


def test_many_marks_take_no_longer() -> None:
    seen = measure.link_seen([(1e-6 * i, i) for i in range(500_000)])

    assert seen is not None
    assert seen.rate == pytest.approx(1_000_000)


def test_the_kernels_count_is_of_the_mapping_that_holds_the_guest() -> None:
    smaps = """\
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
Rss:              100000 kB
Swap:               1000 kB
7f0020000000-7f005ffff000 rwxp 00000000 00:00 0
Rss:              900000 kB
Swap:                  0 kB
"""

    assert measure.largest_resident(smaps, Bytes(256 * MIB)) == 101000 * 1024
    assert measure.largest_resident(smaps, Bytes(4096 * MIB)) is None
    assert measure.largest_resident("", Bytes(MIB)) is None
