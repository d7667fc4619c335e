"""vmckpt schema, and that every command's output has one."""

import json

import jsonschema
import pytest

from tests.support import schemas
from vmckpt.cli import app, docs


def test_every_command_that_prints_json_has_a_schema() -> None:
    assert set(docs.names()) == schemas.commands() - {"schema"}


@pytest.mark.parametrize("name", docs.names())
def test_schemas_are_schemas_and_name_their_command(name: str) -> None:
    found = docs.of(name)
    jsonschema.Draft202012Validator.check_schema(found)
    assert found["title"] == f"vmckpt {name} --json"


def test_they_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["schema"]) == 0
    assert "snapshot create" in capsys.readouterr().out.splitlines()
    assert app.run(["schema", "--json"]) == 0
    assert "migrate" in json.loads(capsys.readouterr().out)
    assert app.run(["schema", "snapshot", "create"]) == 0
    assert json.loads(capsys.readouterr().out) == docs.of("snapshot create")
    assert app.run(["schema", "snapshot"]) == 2
    assert "'snapshot' is not a command that prints JSON" in capsys.readouterr().err


def test_what_is_not_as_its_schema_says_is_found() -> None:
    schemas.held("maintenance list", [])
    with pytest.raises(AssertionError, match="maintenance list"):
        schemas.held("maintenance list", [{"host": 3}])


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--read-only", "jobs", "--json"), "jobs"),
        (("--journal", "none", "snapshot", "list", "web1", "--json"), "snapshot list"),
        (("migrate", "web1", "--to", "beta", "--json"), "migrate"),
        (("snapshot", "keys", "list", "--json"), "snapshot keys list"),
        (("lab", "up"), None),
    ],
)
def test_a_command_is_known_by_its_words(words: tuple[str, ...], name: str | None) -> None:
    assert schemas.called(words) == name
