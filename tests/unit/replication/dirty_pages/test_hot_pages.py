"""What was last sent of a bounded number of pages."""

import random

import numpy as np

from vmckpt.replication.dirty_pages.hot_pages import HotPages


def pages(*values: int) -> np.ndarray:
    return np.repeat(np.array(values, dtype=np.uint64)[:, None], 512, axis=1)


def test_what_was_sent_is_remembered_until_others_take_its_place() -> None:
    hot = HotPages(10, 3)
    hot.put(np.array([1, 2]), pages(11, 12))
    hot.put(np.array([2, 5]), pages(22, 15))
    assert hot.known(np.arange(10)).tolist() == [n in (1, 2, 5) for n in range(10)]
    hot.put(np.array([7]), pages(17))
    assert np.flatnonzero(hot.known(np.arange(10))).tolist() == [2, 5, 7]
    assert hot.content(np.array([2, 5, 7]))[:, 0].tolist() == [22, 15, 17]


def test_what_is_forgotten_is_not_known_and_its_place_is_free() -> None:
    hot = HotPages(10, 3)
    hot.put(np.array([1, 2, 3]), pages(1, 2, 3))
    hot.forget(np.arange(10) == 2)
    assert np.flatnonzero(hot.known(np.arange(10))).tolist() == [1, 3]
    hot.put(np.array([4, 5, 6, 7]), pages(4, 5, 6, 7))
    assert np.flatnonzero(hot.known(np.arange(10))).tolist() == [5, 6, 7]


def test_none_may_be_remembered() -> None:
    hot = HotPages(10, 0)
    hot.put(np.array([1]), pages(1))
    assert not hot.known(np.arange(10)).any()


def test_whatever_is_known_is_what_was_put_last() -> None:
    dice = random.Random(3)
    hot = HotPages(40, 7)
    last: dict[int, int] = {}
    for turn in range(2000):
        some = sorted(dice.sample(range(40), dice.randint(1, 12)))
        if dice.random() < 0.2:
            flags = np.zeros(40, dtype=np.bool_)
            flags[some] = True
            hot.forget(flags)
            assert not hot.known(np.array(some)).any()
        else:
            hot.put(np.array(some), pages(*(turn * 100 + n for n in some)))
            last |= {n: turn * 100 + n for n in some}
        known = np.flatnonzero(hot.known(np.arange(40)))
        assert len(known) <= 7
        assert hot.content(known)[:, 0].tolist() == [last[int(n)] for n in known]
