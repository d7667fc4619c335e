"""Where output goes: results to stdout, everything else to stderr."""

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vmckpt.model.findings import Finding, Severity

# Into a pipe or a file nothing is wrapped: a line stays a line for grep.
_PIPED_WIDTH = 200


class _Console(Console):
    """A console whose reader may go away: what runs goes on without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _console(*, stderr: bool) -> Console:
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return _Console(
        stderr=stderr, highlight=False, soft_wrap=piped, width=_PIPED_WIDTH if piped else None
    )


out = _console(stderr=False)
err = _console(stderr=True)

_STYLES = {
    Severity.OK: "green",
    Severity.INFO: "cyan",
    Severity.WARNING: "yellow",
    Severity.BLOCKER: "bold red",
}


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def say(line: str) -> None:
    """One line of progress on stderr, as it is, whatever the terminal's width."""
    err.print(escape(line), soft_wrap=True)


def complain(line: str) -> None:
    """One line of complaint on stderr."""
    err.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)


def findings(console: Console, found: Iterable[Finding]) -> None:
    """Findings, one paragraph each, with what to do about them."""
    for finding in found:
        style = _STYLES[finding.severity]
        console.print(
            f"[{style}]{finding.severity:<7}[/] {escape(finding.where)}: {escape(finding.text)}"
            f" [dim]({finding.code})[/]"
        )
        if finding.mend is not None:
            console.print(f"        → {escape(finding.mend)}")


def table(*columns: str) -> Table:
    """A table without lines; columns that begin with '>' are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right)
    return made
