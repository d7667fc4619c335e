"""How a protection stands, as its primary tells it."""

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.replication.primary.epoch_capture import Epoch
from vmckpt.replication.primary.pacing import Pace
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.status import Phase, PrimaryStatus
from vmckpt.units import Seconds


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """A status and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.status = PrimaryStatus(self.clock)

    def epoch(self, number: int, *, pause: float = 0.01, lost: int = 0, busy: float = 0.5) -> None:
        zeros = np.zeros((2, 512), dtype=np.uint64)
        changed = Changed(numbers=np.array([1, 2]), pages=zeros, whole=np.array([7]))
        made = Epoch(
            changed=[changed, changed], state=b"", ends=(), packets=4, pause=Seconds(pause),
            phases={"device state": Seconds(0.004)},
        )  # fmt: skip
        self.status.epoch(
            number, made, size=1000, busy=Seconds(busy), sending=Seconds(0.2), lost=lost
        )

    def __getitem__(self, key: str) -> Any:
        return self.status.as_json()[key]


@pytest.fixture
def shown() -> Shown:
    return Shown()


def line(heard: float, sent: int = 0) -> PeerConnection:
    return cast("PeerConnection", SimpleNamespace(heard=heard, sent=sent))


def test_before_anything_it_connects_and_knows_no_lag(shown: Shown) -> None:
    told = shown.status.as_json()
    assert (told["role"], told["phase"]) == ("primary", "connecting")
    assert (told["rpo_s"], told["standby"]) == (None, None)
    assert "median" not in told


def test_all_of_it_is_json(shown: Shown) -> None:
    shown.epoch(1)
    shown.status.copied(5, ready=True)
    shown.status.pace(Pace(interval=Seconds(0.1), why="as asked for"))
    shown.status.heard({"committed": 1})
    told = shown.status.as_json()
    assert json.loads(json.dumps(told)) == told
    assert (told["interval_s"], told["interval_why"]) == (0.1, "as asked for")
    assert (told["pages_left"], told["disks_ready"]) == (5, True)
    assert told["standby"] == {"committed": 1}


def test_an_epoch_is_told_with_its_parts(shown: Shown) -> None:
    shown.epoch(3, lost=2)
    shown.epoch(4, lost=3)
    assert (shown["epoch"], shown["packets_lost"]) == (4, 3)
    assert shown["last"] == {
        "pause_s": 0.01, "busy_s": 0.5, "send_s": 0.2, "bytes": 1000, "pages": 6, "packets": 4,
        "pause_device_state_s": 0.004,
    }  # fmt: skip


def test_what_would_be_lost_is_counted_from_the_capture(shown: Shown) -> None:
    shown.epoch(1, busy=0.5)
    assert math.isclose(shown["rpo_s"], 0.5)
    shown.clock.now += 1.0
    assert math.isclose(shown["rpo_s"], 1.5)
    shown.epoch(2, busy=0.2)
    assert math.isclose(shown["rpo_s"], 0.2)
    assert math.isclose(shown["rpo_worst_s"], 1.5)


def test_medians_are_of_single_epochs_and_the_longest_pause_is_seen(shown: Shown) -> None:
    for number in range(1, 101):
        shown.epoch(number, pause=number / 1000)
    assert math.isclose(shown["median"]["pause_s"], 0.0505)
    assert math.isclose(shown["pause_p99_s"], 0.099)
    assert math.isclose(shown["guest_clock_behind_s"], 5.05)


def test_only_the_last_ten_minutes_worth_of_epochs_make_medians(shown: Shown) -> None:
    for number in range(1500):
        shown.epoch(number, pause=1.0 if number < 900 else 0.001)
    assert math.isclose(shown["median"]["pause_s"], 0.001)
    assert math.isclose(shown["pause_p99_s"], 0.001)


def test_what_is_in_the_way_is_told_until_it_is_over(shown: Shown) -> None:
    shown.status.say("somebody paused it")
    assert shown["says"] == "somebody paused it"
    shown.status.phase(Phase.PROTECTING)
    assert "says" not in shown.status.as_json()
    assert shown["phase"] == "protecting"


def test_silence_counts_from_what_was_heard_last(shown: Shown) -> None:
    shown.clock.now = 103.0
    assert shown.status.silent() == 3.0
    shown.status.connected(line(heard=103.0))
    shown.clock.now = 104.0
    assert shown.status.silent() == 1.0
    shown.status.cut("the line broke")
    shown.clock.now = 106.0
    assert shown.status.silent() == 3.0
    assert shown["says"] == "the line broke"


def test_it_says_for_how_long_it_lasts(shown: Shown) -> None:
    shown.clock.now += 60
    assert shown["protected_for_s"] == 60.0


def test_what_was_sent_is_counted_over_all_lines(shown: Shown) -> None:
    assert shown["sent"] == 0
    shown.status.connected(line(heard=100.0, sent=700))
    assert shown["sent"] == 700
    shown.status.cut("the line broke")
    assert shown["sent"] == 700
    shown.status.connected(line(heard=100.0, sent=11))
    assert shown["sent"] == 711


def test_a_packet_waits_for_half_the_epoch_it_is_sent_in_and_until_that_is_safe(
    shown: Shown,
) -> None:
    shown.epoch(1, pause=0.1, busy=0.2)
    for number in (2, 3):
        shown.clock.now += 0.8 + 0.1  # it has run for a second when it is stopped
        shown.clock.now += 0.2
        shown.epoch(number, pause=0.1, busy=0.2)
    assert math.isclose(shown["output_delay_s"], 0.5 + 0.3)
    assert math.isclose(shown["output_delay_worst_s"], 1.3)


def test_a_longer_epoch_has_more_of_the_packets(shown: Shown) -> None:
    shown.epoch(1, pause=0.0, busy=0.0)
    for number, ran in ((2, 1.0), (3, 3.0)):
        shown.clock.now += ran
        shown.epoch(number, pause=0.0, busy=0.0)
    assert math.isclose(shown["output_delay_s"], (1.0 * 0.5 + 3.0 * 1.5) / 4)


def test_what_waits_for_a_backup_that_is_silent_waits_already(shown: Shown) -> None:
    shown.epoch(1, pause=0.0, busy=0.1)
    shown.clock.now += 4.0
    assert math.isclose(shown["output_delay_worst_s"], 4.1)


def test_while_nothing_is_held_nothing_waits(shown: Shown) -> None:
    shown.epoch(1, pause=0.1, busy=0.1)
    shown.status.let_out(lost=7)
    shown.clock.now += 100.0
    assert math.isclose(shown["output_delay_worst_s"], 0.2)
    shown.epoch(2, pause=0.1, busy=0.1, lost=7)
    assert math.isclose(shown["output_delay_worst_s"], 0.2)
    assert shown["output_delay_s"] is None
    assert shown["packets_lost"] == 7


def test_what_finds_changed_pages_is_named_with_the_reason(shown: Shown) -> None:
    shown.status.finds("compare", "it works everywhere")
    shown.status.phase(Phase.PROTECTING)
    assert (shown["finder"], shown["finder_why"]) == ("compare", "it works everywhere")
