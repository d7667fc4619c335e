"""Schedules of snapshots in policy files."""

from datetime import time

import pytest

from tests.support.paths import ROOT
from tests.support.policies import LEAST, SCHEDULES, policy
from vmckpt.errors import PolicyError
from vmckpt.policy.calendar import Interval, Weekly
from vmckpt.policy.model import Auto, Check, CopyTo, Keep, Proof, Schedule
from vmckpt.units import Seconds


def test_schedules_are_read_whole() -> None:
    often, nightly, paying = policy(LEAST + SCHEDULES).snapshots

    assert often == Schedule(
        name="often", when=Interval(Seconds(900.0)), text="every 15min", memory=False
    )
    assert nightly == Schedule(
        name="nightly",
        when=Weekly(frozenset(range(7)), (time(3),)),
        text="daily 03:00",
        keep=Keep(last=3, daily=7),
        store="near",
        copies=(CopyTo(store="far", keep=Keep(monthly=12)), CopyTo(store="farther")),
        verify=Proof(every=Seconds(7 * 86400.0), depth=Check.DEEP),
    )
    assert paying.when == Auto(Seconds(864000.0))


@pytest.mark.parametrize(
    ("lines", "line", "told"),
    [
        ("- {name: a}", 4, "write either every: 15min or at: daily 03:00"),
        ("- {name: a, every: 1h, at: hourly}", 4, "write either every"),
        ("- name: a\n    every: soon", 5, "'soon' is not a time; use a value like 15min"),
        ("- name: a\n    every: daily 03:00", 5, "for a time of day, use 'at: daily 03:00'"),
        ("- name: a\n    at: 15m", 5, "write every: 15m"),
        ("- name: a\n    at: daily 25:00", 5, "is not a valid schedule; use a value like"),
        ("- name: a\n    every: 60", 5, "60 is not a time"),
        ("- name: A b\n    every: 1h", 4, "snapshots.0.name"),
        ("- name: a\n    every: 1h\n    keep: {last: 0}", 6, "keeps no snapshots; write {last: 7}"),
        ("- name: a\n    every: 1h\n    keep: {dayly: 3}", 6, "did you mean 'daily'?"),
        ("- name: a\n    every: 1h\n    keep: {last: -1}", 6, "keep.last"),
        ("- name: a\n    every: 1h\n    one_failure_in: 3d", 4, "no effect without every: auto"),
        (
            "- name: a\n    every: 1h\n    verify: {every: 1d, depth: full}",
            6,
            "'full' is not a valid value",
        ),
        ("- {name: a, every: 1h, group: yes, memory: no}", 4, "snapshot always includes memory"),
        ("- {name: a, every: auto, group: yes}", 4, "for a group, use an interval like 1h"),
        ("- name: a\n    every: 1h\n    verify: {depth: deep}", 6, "verify.every is missing"),
        ("- {name: a, every: 1h}\n  - {name: a, every: 2h}", 5, "two schedules are named 'a'"),
        (
            "- name: a\n    every: 1h\n    store: far\n    copies:\n    - to: far",
            8,
            "the snapshots are already stored in far",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(lines: str, line: int, told: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(f"{LEAST}snapshots:\n  {lines}\n")

    assert str(caught.value).startswith(f"mine.yaml:{line}: ")
    assert told in str(caught.value)


def test_the_documentation_s_example_is_right() -> None:
    text = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    example = text.split("```yaml\nsnapshots:\n")[1].split("```")[0]

    found = policy(LEAST + "snapshots:\n" + example)
    assert [one.name for one in found.snapshots] == ["often", "nightly"]
