"""The values of a policy's keys, as people write them."""

from datetime import time
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.support.policies import GOOD, policy
from vmckpt.policy import values
from vmckpt.policy.calendar import Weekly
from vmckpt.policy.model import (
    Tls,
)
from vmckpt.policy.values import Plain, TimeUsed, Written
from vmckpt.units import Seconds

THREE = Weekly(frozenset(range(7)), (time(3),))


@pytest.mark.parametrize("written", ["80%", "0.8", "80 %", "'80%'"])
def test_a_share_may_be_written_in_per_cent_or_as_a_number(written: str) -> None:
    found = policy(GOOD.replace("dirty_over_bandwidth: 0.8", f"dirty_over_bandwidth: {written}"))

    assert found.rules[0].when.dirty_over_bandwidth == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("written", "time"),
    [("ask", 0), ("recover for 10m, then ask", 600), ("recover for 90s then ask", 90)],
)  # fmt: skip
def test_a_broken_postcopy_is_resumed_for_a_while_or_asked_about(written: str, time: int) -> None:
    found = policy(GOOD.replace("recover for 5m, then ask", written))

    assert found.recover_for == Seconds(time)


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (values.Time, "300ms", 0.3),
        (values.TimeLimit, "unlimited", None),
        (values.Size, "2GiB", 2 << 30),
        (values.Size, 4096, 4096),
        (values.Rate, "1gbit", 125_000_000),
        (values.Rate, "unlimited", None),
        (values.Part, "4%", 0.04),
        (values.Ratio, "250%", 2.5),
        (values.TimeUsedValue, "80%", TimeUsed(share=0.8)),
        (values.TimeUsedValue, "5m", TimeUsed(time=Seconds(300.0))),
        (values.PerCent, "20%", 20),
        (values.Probe, False, 0.0),
        (values.Period, "7d", 604_800.0),
        (values.Often, "auto", None),
        (values.Calendar, "Daily  03:00", Written("daily 03:00", THREE)),
        (values.TlsWord, False, Tls.OFF),
        (values.PlainWord, "pause", Plain.PAUSE),
    ],
)
def test_what_people_write_becomes_what_the_program_has(
    kind: Any, written: object, value: object
) -> None:
    found = TypeAdapter(kind).validate_python(written)

    assert found == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("kind", "written", "told"),
    [
        (values.Time, 300, "300 is not a time; use a value with a unit"),
        (values.Time, "0s", "must be greater than 0"),
        (values.Downtime, "2001s", "more than QEMU accepts"),
        (values.Size, True, "True is not a size"),
        (values.Size, "0", "must be greater than 0"),
        (values.Rate, "100KiB/s", "the minimum is 1MiB/s"),
        (values.Part, "100%", "is not between 0.01% and 99%"),
        (values.Ratio, float("nan"), "is not between"),
        (values.TimeUsedValue, "100%", "at 100% the migration is cancelled"),
        (values.PerCent, 0, "is not a percentage of CPU time"),
        (values.Probe, "61s", "1s and 60s; use off to disable"),
        (values.Period, "daily 03:00", "is not a time; use a value like 15min"),
        (values.Often, "daily 03:00", "for a time of day, use 'at: daily"),
        (values.Calendar, "6h", "write every: 6h"),
        (values.ModeWord, "hybird", "did you mean 'hybrid'?"),
        (values.PlainWord, "compress", "compress needs values, like {compress: {cache: 64MiB}}"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(
    kind: Any, written: object, told: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(written)

    assert told in str(caught.value)
