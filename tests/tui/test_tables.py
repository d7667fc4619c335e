"""Rows and columns of what is known."""

from typing import Any

import pytest

from tests.support.dashboards import MODEL, cells
from tests.tui import still
from tests.tui.still import FLEET, NOW, SNAPSHOTS, snapshot
from vmckpt_tui import tables


def test_a_guest_is_shown_with_its_job_its_standby_and_its_last_snapshot() -> None:
    index = tables.index(MODEL, NOW)
    columns = tables.guest_columns(lambda: index)
    by_name = {one.name: cells(columns, one) for one in FLEET.guests}
    assert by_name["busy"][7] == "m-7k3f 72%"
    assert by_name["safe"][5] == "✓ 110 ms"
    assert by_name["web1"][6] == "15 min ago"
    assert by_name["old"][1] == "○ off"
    assert by_name["web1"][8] == "tier=web"


def test_hosts_say_what_is_wrong_with_them() -> None:
    index = tables.index(MODEL, NOW)
    told = {one.name: cells(tables.host_columns(lambda: index), one) for one in FLEET.hosts}
    assert told["alpha"][6] == "3"
    assert told["omega"][1:3] == ["–", "–"]
    assert told["omega"][7].startswith("✗ omega: no answer")
    assert told["delta"][7].startswith("! it is in maintenance")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["web1", "web2", "db1", "old", "busy", "safe"]),
        ("web", ["web1", "web2"]),
        ("ALPHA off", ["old"]),
        ("tier=web", ["web1"]),
        (still.uuid(3), ["db1"]),
        ("nobody", []),
    ],
)
def test_each_word_must_be_somewhere(text: str, names: list[str]) -> None:
    assert [one.name for one in tables.Finder().matching(FLEET.guests, text)] == names


def test_snapshots_are_trees_and_whoever_lost_a_parent_is_a_root() -> None:
    found = tables.leaves((*SNAPSHOTS, snapshot("s-eee", 1, "lost", parent="s-zzz")))
    told = [(one.snapshot.id, one.depth) for one in found]
    assert sorted(told) == [(id_, 0) for id_ in ("s-aaa", "s-bbb", "s-ccc", "s-ddd", "s-eee")]
    assert [id_ for id_, _ in told].index("s-bbb") == [id_ for id_, _ in told].index("s-aaa") + 1
    branch = tables.leaves((*SNAPSHOTS, snapshot("s-fff", 1, "other", parent="s-aaa")))
    assert {one.snapshot.id: one.depth for one in branch}["s-fff"] == 1


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"damaged": True, "verified": "no (deep)", "verified_at": NOW - 60}, "✗ no (deep) "),
        ({"verified": "badly needed", "verified_at": NOW - 60}, "✓ badly needed "),
        ({"verified": "not yet"}, "not yet"),
    ],
)
def test_the_wording_of_a_verification_does_not_decide_how_it_is_marked(
    more: dict[str, Any], shown: str
) -> None:
    (leaf,) = tables.leaves([snapshot("s-a", 1, "a", **more)])
    (column,) = [one for one in tables.snapshot_columns(lambda: NOW) if one.label == "verified"]
    assert column.cell(leaf)[0].startswith(shown)


def test_a_line_of_ten_thousand_snapshots_and_a_circle_are_shown() -> None:
    line = [snapshot(f"s-{n}", 1, f"n{n}", parent=f"s-{n - 1}", made_at=n) for n in range(10_000)]
    assert len(tables.leaves(line)) == 10_000
    circle = [snapshot("s-a", 1, "a", parent="s-b"), snapshot("s-b", 1, "b", parent="s-a")]
    assert len(tables.leaves(circle)) == 2
