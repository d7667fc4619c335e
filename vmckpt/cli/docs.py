"""vmckpt manual and vmckpt schema: manual pages, and JSON Schemas of --json output."""

import json as jsonlib
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

import vmckpt
from vmckpt.cli import output
from vmckpt.cli.arguments import JSON
from vmckpt.errors import BadInput
from vmckpt.units import show_count

manual_app = typer.Typer(rich_markup_mode=None, add_completion=False)


@manual_app.command()
def manual(
    folder: Annotated[
        Path,
        typer.Option("--to", metavar="DIR", help="man1 directory in MANPATH; created if missing."),
    ],
) -> None:
    """Write a manual page for every command.

    The pages have the same text as --help.

    Examples:

        vmckpt manual --to ~/.local/share/man/man1

        vmckpt manual --to /usr/local/share/man/man1
    """
    # The pages require all commands; only this command loads them all.
    from vmckpt.cli import app as cli_app

    found = pages("vmckpt", typer.main.get_command(cli_app.app))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (folder / name).write_text(text)
    except OSError as exc:
        raise BadInput(f"{exc.filename or folder}: {exc.strerror}") from None
    output.say(f"{show_count(len(found), 'page')} written to {folder}; run man vmckpt")


def pages(path: str, command: Any, parent: Any = None) -> Mapping[str, str]:
    """Return the pages of a command and of its subcommands, by file name."""
    context = command.context_class(command, info_name=path.rpartition(" ")[2], parent=parent)
    found = {f"{path.replace(' ', '-')}.1": _page(path, command, context)}
    for name in _below(command, context):
        found |= pages(f"{path} {name}", command.get_command(context, name), context)
    return found


def _below(command: Any, context: Any) -> list[str]:
    return list(command.list_commands(context)) if hasattr(command, "list_commands") else []


def _page(path: str, command: Any, context: Any) -> str:
    name, short = path.replace(" ", "-"), command.get_short_help_str(200).rstrip(".")
    usage = " ".join(command.collect_usage_pieces(context))
    told = [
        f'.TH "{name.upper()}" 1 "" "vmckpt {vmckpt.__version__}" "vmckpt"',
        ".SH NAME", f"{_roff(name)} \\- {_roff(short)}",
        ".SH SYNOPSIS", f".B {_roff(path)}",
        _roff(usage),
        *_described(command.help or short),
    ]  # fmt: skip
    told += _options(command, context)
    if below := _below(command, context):
        told.append(".SH COMMANDS")
        for sub in below:
            text = command.get_command(context, sub).get_short_help_str(200)
            told += [".TP", f".BR {_roff(f'{name}-{sub}')} (1)", _roff(text)]
    above = name.rpartition("-")[0] or "vmckpt-doctor"
    return "\n".join([*told, ".SH SEE ALSO", f".BR {_roff(above)} (1)"]) + "\n"


def _options(command: Any, context: Any) -> list[str]:
    records = [one.get_help_record(context) for one in command.get_params(context)]
    told = []
    for words, text in filter(None, records):
        # "GUEST <str>": the type is left out, as it adds nothing.
        told += [".TP", f".B {_roff(words.partition(' <')[0])}", _roff(text or "")]
    return [".SH OPTIONS", *told] if told else []


def _described(text: str) -> list[str]:
    """Format the paragraphs of a command's help. Indented paragraphs are examples."""
    told = [".SH DESCRIPTION"]
    for part in re.split(r"\n\s*\n", text.strip()):
        lines = part.split("\n")
        if part.strip() in ("Example:", "Examples:"):
            told.append(".SH EXAMPLES")
        elif all(line.startswith("    ") for line in lines):
            told += [".PP", ".RS 4", ".nf", *(_roff(line.strip()) for line in lines), ".fi", ".RE"]
        else:
            told += [".PP", _roff(" ".join(line.strip() for line in lines))]
    return told


def _roff(text: str) -> str:
    """Escape a text for troff."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in plain.split("\n"))


schema_app = typer.Typer(rich_markup_mode=None, add_completion=False)
_END = ".json"


@schema_app.command()
def schema(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="The command, like snapshot create."),
    ] = None,
    json: JSON = False,
) -> None:
    """Print the JSON Schema of a command's --json output.

    Without COMMAND, the commands that have a schema are listed. For commands that print one JSON
    object per line, the schema describes one line. Fields may be added at any time; the change log
    lists fields that are removed or whose meaning changes.

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
    """Return the commands that print JSON, such as "snapshot create"."""
    files = (one.name for one in _folder().iterdir())
    return sorted(one.removesuffix(_END).replace("_", " ") for one in files if one.endswith(_END))


def of(name: str) -> dict[str, Any]:
    """Return the schema of a command's output. Raises BadInput if the command has none."""
    if name not in names():
        raise BadInput(
            f"{name!r} is not a command that prints JSON",
            hint="run vmckpt schema to list the commands that print JSON",
        )
    text = _folder().joinpath(name.replace(" ", "_") + _END).read_text()
    return dict(jsonlib.loads(text))


def _folder() -> Any:
    return resources.files("vmckpt.cli") / "schemas"
