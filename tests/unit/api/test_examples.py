"""The examples of docs/api.md run, and print what they should."""

from pathlib import Path

import pytest

from tests.support.api_answers import Answers, evacuation_plan, stays
from tests.support.doc_commands import Block, blocks
from tests.support.paths import ROOT
from vmckpt.errors import MigrationFailed

EXAMPLES = [one for one in blocks(ROOT / "docs/api.md") if one.tag == "python"]
PRINTS = [
    "libvirt ", "web1 is on beta, paused for 0.083 s", "moved: 1, remaining: 0",
    "s-2", "db1 is running on beta", "",
]  # fmt: skip
"""A part of what each example prints, in their order."""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    made = Answers()
    made.install(monkeypatch, tmp_path)
    return made


def run(example: Block) -> None:
    exec(compile("\n".join(example.lines), f"docs/api.md:{example.number}", "exec"), {})


@pytest.mark.parametrize(("example", "told"), list(zip(EXAMPLES, PRINTS, strict=True)))
@pytest.mark.usefixtures("answers")
def test_an_example_runs(example: Block, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(example)
    assert told in capsys.readouterr().out


def test_the_examples_take_other_paths_as_well(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.answers["migrate"] = MigrationFailed("no route; web1 is running on alpha")
    run(EXAMPLES[1])
    answers.answers["evacuation plan"] = evacuation_plan(stays())
    run(EXAMPLES[2])
    assert capsys.readouterr().out.splitlines() == [
        "web1 stays where it is: no route; web1 is running on alpha",
        "db1 cannot be moved: it uses a GPU; detach it",
    ]
    assert "carry_out" not in [name for name, _, _ in answers.asked]


def test_every_method_is_in_the_page() -> None:
    from vmckpt.api import Client  # noqa: PLC0415

    page = (ROOT / "docs/api.md").read_text()
    methods = [name for name in vars(Client) if not name.startswith("_")]
    assert [name for name in methods if f"`{name}(" not in page] == []
