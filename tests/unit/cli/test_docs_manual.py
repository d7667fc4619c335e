"""Manual pages, as man itself reads them."""

import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vmckpt.cli import app, docs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("man") / "man1"
    done = CliRunner().invoke(docs.manual_app, ["--to", str(found)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found


def test_every_command_has_a_page_with_its_options_and_examples(folder: Path) -> None:
    names = {one.name for one in folder.iterdir()}
    assert {"vmckpt.1", "vmckpt-migrate.1", "vmckpt-snapshot-create.1", "vmckpt-events.1"} <= names
    told = (folder / "vmckpt-migrate.1").read_text()
    for words in (".SH NAME", ".SH EXAMPLES", "\\-\\-to", "vmckpt migrate web1 \\-\\-to beta"):
        assert words in told
    everything = (folder / "vmckpt.1").read_text()
    context = typer.main.get_command(app.app)
    for name in context.list_commands(None):  # type: ignore[attr-defined]
        assert f"vmckpt\\-{name}" in everything


def test_groff_has_nothing_to_say_against_them(folder: Path) -> None:
    for page in sorted(folder.iterdir()):
        done = subprocess.run(
            ["groff", "-Kutf8", "-man", "-Tutf8", "-ww", str(page)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == "", page.name
        assert done.stdout.strip()
