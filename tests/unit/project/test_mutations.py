"""The table of mutations fits the tree, and its runner tells caught ones from others."""

import os
from pathlib import Path

import pytest

from bench.mutations import runner, scratch
from bench.mutations.mutation import Area, Mutation, OutOfDate, Suite, chosen, problems
from bench.mutations.runner import (
    LEAST,
    Outcome,
    Verdict,
    judge,
    limit_for,
    to_be_confirmed,
    try_all,
)
from bench.mutations.scratch import Run
from bench.mutations.table import TABLE
from tests.support.paths import ROOT


def test_the_table_fits_the_tree() -> None:
    """Where this fails a line was changed: change its mutation, and run bench.mutations."""
    assert list(problems(TABLE, ROOT)) == []


def mutation(
    name: str = "less", *, old: str = "a < b", new: str = "a > b", **more: str
) -> Mutation:
    told = {"file": "vmckpt/rule.py", "breaks": "The rule says the opposite.", **more}
    keyword = told.pop("keyword", "")
    return Mutation(
        name=name, area=Area.LEASE, old=old, new=new, suite=Suite(("tests/test_rule.py",), keyword),
        **told,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (mutation(old="a < c"), "less: its text occurs 0 times in vmckpt/rule.py"),
        (mutation(old="a"), "less: its text occurs 4 times in vmckpt/rule.py"),
        (mutation(new="a > b  # smaller", old="a > b"), "occurs 0 times"),
        (mutation(new="a <"), "less: is no Python"),
        (mutation(new="(a < b)"), "less: it changes no code"),
        (mutation(file="vmckpt/gone.py"), "less: there is no vmckpt/gone.py"),
        (mutation(breaks="Much"), "less: it does not say in a sentence what it breaks"),
    ],
)
def test_a_table_that_is_out_of_date_is_told_of(tree: Path, wrong: Mutation, told: str) -> None:
    assert any(told in one for one in problems([wrong], tree))


def test_areas_and_names_and_tests_are_looked_at(tree: Path) -> None:
    (tree / "tests/test_rule.py").unlink()
    found = list(problems([mutation(), mutation()], tree))
    assert "less: there is no tests/test_rule.py" in found
    assert "less: 2 mutations have this name" in found
    assert "no mutation is about fencing" in found
    assert "there are 2 mutations, and 40 are required" in found


def test_some_are_chosen_by_name_or_area() -> None:
    table = [mutation("one"), mutation("two")]
    assert chosen(table, []) == chosen(table, ["lease"]) == tuple(table)
    assert chosen(table, ["two"]) == (table[1],)
    with pytest.raises(ValueError, match="'three'"):
        chosen(table, ["two", "three"])


def run(code: int | None, test: str | None = "tests/x.py::test_it") -> Run:
    return Run(code=code, test=test, seconds=1.0, output="")


@pytest.mark.parametrize(
    ("first", "again", "without", "verdict"),
    [
        (run(0), None, None, Verdict.SURVIVED),
        (run(1), run(1), run(0), Verdict.CAUGHT),
        (run(1), run(0), run(0), Verdict.LUCK),
        (run(1), run(None), run(0), Verdict.LUCK),
        (run(1), run(1), run(1), Verdict.LUCK),  # it fails by itself
        (run(None), run(None), run(0), Verdict.HANGS),
        (run(None), run(0), run(0), Verdict.LUCK),
        (run(None), run(None), run(None), Verdict.LUCK),
        (run(1, None), None, None, Verdict.BROKEN),  # nothing was run
        (run(2, None), None, None, Verdict.BROKEN),  # it cannot be imported
        (run(5, None), None, None, Verdict.BROKEN),  # no test was found
    ],
)
def test_what_became_of_a_mutation(
    first: Run, again: Run | None, without: Run | None, verdict: Verdict
) -> None:
    assert to_be_confirmed(first) is (again is not None)
    assert judge(first, again, without) is verdict


def test_hanging_takes_many_times_as_long_as_without_a_mutation() -> None:
    assert limit_for(Run(code=0, test=None, seconds=1.0, output="")) == LEAST
    assert limit_for(Run(code=0, test=None, seconds=20.0, output="")) == 120.0


RULE = "def less(a, b):\n    return a < b\n\n\ndef more(a, b):\n    return a + 1\n"
TESTS = """import json, os, subprocess, sys, time
from vmckpt import rule
from pathlib import Path

def test_less():
    assert rule.less(1, 2)
    assert not rule.less(2, 1)

def test_more():
    assert rule.more(1, 2) == 2

def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

def test_loop():
    while not rule.less(1, 2):
        time.sleep(0.01)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "vmckpt").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (root / "vmckpt/__init__.py").touch()
    (root / "vmckpt/rule.py").write_text(RULE)
    (root / "tests/test_rule.py").write_text(TESTS)
    return root


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where its scratch copies are."""
    made = tmp_path / "scratch"
    made.mkdir()
    monkeypatch.setattr("bench.mutations.runner.tempfile.mkdtemp", lambda **_: str(made))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than these tests
    return made


def try_them(tree: Path, *table: Mutation) -> list[Outcome]:
    return try_all(table, tree, 2, lambda _: None, lambda _: None)


def left_over(folder: Path) -> list[str]:
    """Commands of processes that the mark of a run in that folder is on."""
    found = []
    for one in Path("/proc").glob("[0-9]*/environ"):
        try:
            told = one.read_bytes()
            mine = one.parent.name == str(os.getpid())
            if scratch.MARK.encode() in told and str(folder).encode() in told and not mine:
                found.append((one.parent / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_each_is_broken_by_itself_and_nothing_is_left(tree: Path, folder: Path) -> None:
    found = try_them(
        tree, mutation("turned"), mutation("unnoticed", old="a < b", new="a < b and a != 7"),
        mutation("other", old="a + 1", new="a + 2"), mutation("broken", new="a < b +-*"),
    )  # fmt: skip
    assert [(one.mutation.name, one.verdict) for one in found] == [
        ("turned", Verdict.CAUGHT), ("unnoticed", Verdict.SURVIVED), ("other", Verdict.CAUGHT),
        ("broken", Verdict.BROKEN),
    ]  # fmt: skip
    assert [one.by for one in found[::2]] == [
        "tests/test_rule.py::test_less", "tests/test_rule.py::test_more",
    ]  # fmt: skip
    assert (tree / "vmckpt/rule.py").read_text() == RULE
    assert not folder.exists()
    assert left_over(folder) == []


def test_one_that_makes_tests_hang_is_caught(
    tree: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAST", 2.0)
    monkeypatch.setattr(runner, "FAR", 3.0)
    (one,) = try_them(tree, mutation(keyword="loop"))
    assert (one.verdict, one.by) == (Verdict.HANGS, "tests/test_rule.py::test_loop")
    assert not folder.exists()


def test_ctrl_c_leaves_nothing(tree: Path, folder: Path) -> None:
    def stop(_: Outcome) -> None:
        raise KeyboardInterrupt

    loops = mutation("loops", keyword="process or loop")
    with pytest.raises(KeyboardInterrupt):
        try_all([mutation(keyword="less"), loops], tree, 2, lambda _: None, stop)
    assert not folder.exists()
    assert left_over(folder) == []


def test_tests_that_fail_by_themselves_prove_nothing(tree: Path, folder: Path) -> None:
    (tree / "tests/test_rule.py").write_text("def test_it():\n    assert False\n")
    (one,) = try_them(tree, mutation())
    assert (one.verdict, one.by) == (Verdict.UNFIT, "tests/test_rule.py::test_it")
    assert not folder.exists()


def test_a_line_that_is_not_there_ends_it(tree: Path, folder: Path) -> None:
    with pytest.raises(OutOfDate, match="occurs 0 times"):
        try_them(tree, mutation(old="a <= b"))
    assert not folder.exists()


def test_code_of_another_tree_is_not_taken_for_the_mutated(tree: Path, folder: Path) -> None:
    """The checkout is installed in the same Python."""
    (tree / "tests/conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tree)!r})\nsys.modules.pop('vmckpt', None)\n"
    )
    with pytest.raises(scratch.WrongCode, match="is not in"):
        try_them(tree, mutation())
    assert not folder.exists()
