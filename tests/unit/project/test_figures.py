"""The tables of docs/figures.md are those of the stored results, one for each benchmark."""

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import figures, forecast, migration, plans, run
from bench.figure import Figure, Result, best, row, shown, table

PAGE = figures.PAGES[0].read_text()
RESULT = Result(
    figures=(Figure(what="total", unit="s", ours=3.0, limit=1.5, limit_is="link", peer=4.0,
                    peer_is="virsh"),),
    versions={"libvirt": "9.0.0"},
).as_json({"cores": 2, "load": 0.25})  # fmt: skip


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_the_pages_show_the_results_that_are_stored(page: Path) -> None:
    text = page.read_text()
    assert figures.written(text, figures.stored) == text, "run python -m bench.figures"
    assert ("<!-- summary -->" in text) == (page.name == "README.md")


def test_every_benchmark_has_a_table_and_a_function() -> None:
    assert sorted(figures.names(PAGE)) == sorted(run.BENCHES)
    for name in run.BENCHES:
        measure = importlib.import_module(f"bench.{name}").measure
        assert list(inspect.signature(measure).parameters) == ["quick"], name


def test_each_stored_result_names_the_source_of_each_limit_and_competitor() -> None:
    for name in run.BENCHES:
        for one in (figures.stored(name) or {"figures": []})["figures"]:
            assert one["limit"] is None or one["limit_is"], (name, one["what"])
            assert one["peer"] is None or one["peer_is"], (name, one["what"])
            assert one["ours"] >= 0, (name, one["what"])


def test_the_summary_has_a_row_for_each_of_its_figures_that_was_measured() -> None:
    known = {name for name, _, _ in figures.SUMMARY.values() if figures.stored(name)}
    wanted = [text for text, (name, _, _) in figures.SUMMARY.items() if name in known]
    assert [line.split(" | ")[0][2:] for line in figures.summary(figures.stored)] == wanted

    said = {
        "failover": Result(figures=(Figure(what="power-off, lease", unit="s", ours=1.4),)).as_json(
            {}
        )
    }
    assert figures.summary(said.get) == [
        "| power-off of a protected guest's host to its first answer | 1.40 s | – |  | – |  |"
    ]


def test_a_row_has_the_ratio_to_the_limit_and_to_the_competitor() -> None:
    assert (
        row(RESULT["figures"][0])
        == "| total | 3.00 s | 1.50 s (link) | 2.00 × | 4.00 s (virsh) | 0.75 × |"
    )
    alone = Figure(what="memory", unit="MiB", ours=136.2)
    (told,) = Result(figures=(alone,)).as_json({})["figures"]
    assert row(told) == "| memory | 136 MiB | – |  | – |  |"


def test_a_table_is_replaced_and_all_other_text_is_kept() -> None:
    old = "<!-- figures one -->\nold\n<!-- end -->"
    page = f"before\n{old}\nbetween\n<!-- figures two -->\n<!-- end -->\n"
    known: Mapping[str, Any] = {"one": RESULT}

    made = figures.written(page, known.get)

    assert "old" not in made
    assert made.startswith("before\n<!-- figures one -->\n\n| | vmckpt |")
    assert (
        "With libvirt 9.0.0, 2 cores with a load of 0.2 before the run.\n\n<!-- end -->\nbetween"
        in made
    )
    assert "*Not measured.*" in made
    assert figures.written(made, known.get) == made
    assert table(None) == ["*Not measured.*"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234 s"), (123.4, "123 s"), (12.34, "12.3 s"), (1.234, "1.23 s"),
     (0.9949, "0.995 s"), (0.01234, "0.0123 s"), (0.001234, "0.00123 s"), (0.0, "0.000 s")],
)  # fmt: skip
def test_values_have_three_digits(value: float, text: str) -> None:
    assert shown(value, "s") == text


def test_the_best_competitor_has_the_lowest_or_highest_value() -> None:
    values = {"virsh": 3.0, "virsh --parallel": 2.0, "never ends": None}
    assert best(values) == (2.0, "virsh --parallel")
    assert best(values, most=True) == (3.0, "virsh")
    assert best({"never ends": None}) == (None, "")


def test_hbal_gets_every_host_and_guest_and_evacuates_closed_hosts() -> None:
    fleet, leaving = plans.rack(seed=1, hosts=3, guests=20, emptied=1)
    groups, nodes, instances, policy = plans.hbal_text(fleet).split("\n\n")

    hosts = [line.split("|") for line in nodes.splitlines()]
    assert [host[7] for host in hosts] == ["Y", "N", "M"]
    for host in hosts:
        used = sum(one.memory for one in fleet.tenants if one.host == host[0])
        assert int(host[1]) - int(host[3]) == used >> 20
    guests = [line.split("|") for line in instances.splitlines()]
    assert len(guests) == len(fleet.tenants)
    assert sum(guest[6] == hosts[0][0] for guest in guests) == len(leaving) > 0
    assert groups == "default|group|preferred||"
    assert policy.count("|ext|") == 2


def test_a_migration_that_did_not_end_is_no_competitor() -> None:
    def run(peer: str, total: float, *, finished: bool = True) -> dict[str, Any]:
        return {
            "peer": peer, "finished": finished, "total": total, "by_libvirt": None,
            "blackout": 0.3, "undisturbed": 0.005, "first_pass": 100e6,
        }  # fmt: skip

    case = migration.Case("1GiB", "8MiB@1MiB/s", "1gbit", 1, ("virsh", "virsh --parallel"))
    runs = [run("vmckpt", 2.0), run("virsh", 1.0, finished=False), run("virsh --parallel", 4.0)]
    told = {"bandwidth": 100e6, "round_trip": 0.0001, "runs": runs}
    total, downtime = migration.figures(case, told)
    assert (total.ours, total.limit, total.peer, total.peer_is) == (
        2.0,
        1.0,
        4.0,
        "virsh --parallel",
    )
    assert downtime.ours == pytest.approx(295.0)
    assert downtime.limit == 0.1


def test_the_width_of_a_forecast_is_compared_with_the_spread_of_results() -> None:
    def forecast_of(width: float, totals: list[float]) -> dict[str, Any]:
        mark = {"expected": [1.0, 9.0], "covered": True, "width": width}
        row = {"region_mib": 18, "rate_mib": 59, "link": "400mbit"}
        return {"row": row, "totals_s": totals, "score": {"total": mark, "converged": True}}

    rows = [forecast_of(0.1, [2.0]), forecast_of(0.8, [2.0, 6.0, 4.0])]
    held, narrow, *_, wide = forecast.figures(rows)
    assert (held.ours, held.limit, narrow.ours) == (2, 2, 1)
    assert (wide.ours, wide.limit) == (80.0, 50.0)
