"""vmckpt schema: the form of what commands print with --json."""

import json as jsonlib
from importlib import resources
from typing import Annotated, Any

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import JSON
from vmckpt.errors import BadInput

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_END = ".json"


@app.command()
def schema(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="As it is typed.")
    ] = None,
    json: JSON = False,
) -> None:
    """Print the JSON Schema of what a command prints with --json; without COMMAND, which have one.

    What a command tells line by line has the schema of a line. Fields may be added; none goes or
    changes its meaning without a word in the change log.

    Examples:

        vmckpt schema migrate

        vmckpt schema snapshot create > created.schema.json
    """
    if words:
        output.print_json(of(" ".join(words)))
        return
    found = names()
    if json:
        output.print_json(found)
        return
    for one in found:
        output.out.print(one)


def names() -> list[str]:
    """Commands that print JSON, as they are typed."""
    files = (one.name for one in _folder().iterdir())
    return sorted(one.removesuffix(_END).replace("_", " ") for one in files if one.endswith(_END))


def of(name: str) -> dict[str, Any]:
    """The schema of a command's output. Raises BadInput."""
    if name not in names():
        raise BadInput(
            f"no command {name!r} prints JSON", mend="vmckpt schema tells which commands do"
        )
    text = _folder().joinpath(name.replace(" ", "_") + _END).read_text()
    return dict(jsonlib.loads(text))


def _folder() -> Any:
    return resources.files("vmckpt.cli") / "schemas"
