from dataclasses import replace
from typing import Any

import pytest

from tests.support.builders import GUEST
from tests.support.moving import rule
from tests.support.policies import GOOD, LEAST, policy
from vmckpt.migration import request
from vmckpt.migration.request import IDLE_THROTTLE, PolicyOverrides
from vmckpt.model.migration import AutoConverge, Compression, Driver, Mode, MoveOrder
from vmckpt.policy.model import Compress, CopyKind, LeftBehind, Policy, StartPostcopy, Throttle, Tls
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

PLAIN = policy()
BOTH = rule(StartPostcopy())


def ordered(made: Policy, mode: Mode = Mode.PRECOPY) -> MoveOrder:
    return request.order(
        made, mode, GUEST, driver=Driver.CLIENT, storage_proven=True, tls_name="beta"
    )


def test_no_wish_changes_nothing() -> None:
    good = policy(GOOD)

    assert request.apply_overrides(good, PolicyOverrides()) == good


def test_wishes_come_before_the_policy() -> None:
    made = request.apply_overrides(policy(GOOD), PolicyOverrides(
        mode=Mode.PRECOPY, bandwidth=BytesPerSecond(7), max_downtime=Seconds(1.0),
        tls=Tls.REQUIRED, copy=CopyKind.FULL,
    ))  # fmt: skip

    assert (made.mode, made.limits.max_downtime) == (Mode.PRECOPY, 1.0)
    assert (made.limits.bandwidth, made.limits.postcopy_bandwidth) == (7, 7)
    assert (made.transport.tls, made.storage.copy) == (Tls.REQUIRED, CopyKind.FULL)
    assert made.limits.time == 1800.0


def test_by_epochs_the_images_of_the_source_stay() -> None:
    removes = policy(LEAST + "storage: {copy: thin, left_behind: remove}\n")
    assert (
        request.apply_overrides(removes, PolicyOverrides()).storage.left_behind is LeftBehind.REMOVE
    )
    by_epochs = request.apply_overrides(removes, PolicyOverrides(mode=Mode.CHECKPOINT))
    assert by_epochs.storage.left_behind is LeftBehind.KEEP


def test_the_operators_time_limit_is_the_only_one() -> None:
    limits = request.apply_overrides(policy(GOOD), PolicyOverrides(timeout=Seconds(5.0))).limits

    assert (limits.time, limits.time_per_gib) == (5.0, None)


@pytest.mark.parametrize(
    ("mode", "rules", "post_copy", "chosen"),
    [
        (Mode.AUTO, (BOTH,), True, Mode.HYBRID),
        (Mode.AUTO, (BOTH,), False, Mode.PRECOPY),
        (Mode.AUTO, (), True, Mode.PRECOPY),
        (Mode.HYBRID, (BOTH,), True, Mode.HYBRID),
        (Mode.HYBRID, (BOTH,), False, Mode.PRECOPY),
        (Mode.PRECOPY, (), True, Mode.PRECOPY),
        (Mode.POSTCOPY, (), True, Mode.POSTCOPY),
        (Mode.POSTCOPY, (), False, Mode.POSTCOPY),
        (Mode.STOP_AND_COPY, (), True, Mode.STOP_AND_COPY),
    ],
)
def test_without_a_forecast_the_way_out_is_kept_where_there_is_one(
    mode: Mode, rules: tuple[Any, ...], post_copy: bool, chosen: Mode
) -> None:
    made = replace(PLAIN, mode=mode, rules=rules)

    assert request.plain_choice(made, post_copy=post_copy) is chosen


def test_what_the_controller_is_held_to() -> None:
    made = request.terms(policy(GOOD), Mode.HYBRID, GUEST)

    assert (made.post_copy, made.time_limit, made.max_downtime) == (True, 150.0, 0.3)
    assert not request.terms(policy(GOOD), Mode.PRECOPY, GUEST).post_copy
    resumed = request.resumed(policy(GOOD))
    assert (resumed.time_limit, resumed.post_copy) == (None, True)


def test_a_plain_order_asks_for_nothing() -> None:
    made = ordered(PLAIN)

    assert (made.live, made.post_copy, made.auto_converge, made.xbzrle_cache) == (
        True, False, None, None,
    )  # fmt: skip
    assert (made.compression, made.connections) == (Compression.NONE, 1)
    assert (made.driver, made.tls_name, made.persistent) == (Driver.CLIENT, "beta", True)


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.POSTCOPY])
def test_an_order_that_may_switch_says_so(mode: Mode) -> None:
    assert ordered(PLAIN, mode).post_copy


def test_what_a_rule_may_switch_on_later_is_there_and_does_next_to_nothing() -> None:
    later = AutoConverge(initial=50, increment=10, at_most=99)
    made = ordered(replace(PLAIN, rules=(rule(Throttle(later)), rule(Compress(Bytes(64 * MIB))))))

    assert made.auto_converge == IDLE_THROTTLE == AutoConverge(initial=1, increment=1, at_most=1)
    assert made.compression is Compression.XBZRLE
    assert made.xbzrle_cache is not None
    assert made.xbzrle_cache < MIB


def test_a_guest_that_stands_still_is_not_slowed_down_either() -> None:
    rules = (rule(Throttle(IDLE_THROTTLE)), rule(Compress(Bytes(64 * MIB))))
    made = ordered(replace(PLAIN, rules=rules), Mode.STOP_AND_COPY)

    assert (made.live, made.auto_converge, made.compression) == (False, None, Compression.NONE)


def test_compression_that_is_wanted_from_the_start_is_not_made_idle_by_a_rule() -> None:
    xbzrle = replace(PLAIN.transport, compression=Compression.XBZRLE)
    made = ordered(replace(PLAIN, transport=xbzrle, rules=(rule(Compress(Bytes(64 * MIB))),)))

    assert (made.compression, made.xbzrle_cache) == (Compression.XBZRLE, None)
