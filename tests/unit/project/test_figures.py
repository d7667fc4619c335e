"""The tables of docs/figures.md are those of the stored results, one for each benchmark."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from bench import figures, run
from bench.figure import Figure, Result, best, row, shown, table

PAGE = figures.PAGE.read_text()
RESULT = Result(
    figures=(Figure(what="total", unit="s", ours=3.0, limit=1.5, limit_is="link", peer=4.0,
                    peer_is="virsh"),),
    versions={"libvirt": "9.0.0"},
).as_json({"cores": 2, "load": 0.25})  # fmt: skip


def test_the_page_shows_the_results_that_are_stored() -> None:
    assert figures.written(PAGE, figures.stored) == PAGE, "run python -m bench.figures"


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


def test_a_row_has_the_ratio_to_the_limit_and_to_the_competitor() -> None:
    assert (
        row(RESULT["figures"][0])
        == "| total | 3.00 s | 1.50 s (link) | 2 × | 4.00 s (virsh) | 0.75 × |"
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
