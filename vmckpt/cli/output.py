"""Print the output of commands (results to stdout, everything else to stderr), and stop commands on
signals.

Names, errors and answers of hosts are untrusted text. Terminal control characters in untrusted text
are printed as escapes (like "\\x1b"), never sent to the terminal.
"""

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vmckpt.model.finding import Finding, Severity

# Lines are not wrapped in a pipe or a file, so that grep finds whole lines.
_PIPED_WIDTH = 200
WIDTH = "VMCKPT_WIDTH"
_LONGEST_LINE = 4000
# Control characters, bidirectional controls, other line separators, surrogates.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_BREAKS = re.compile("[\n\t]")


def styled(style: str, text: str) -> Text:
    """Return a sanitised text in a style. Markup in the text is not interpreted."""
    return Text(harmless(text), style)


def harmless(text: str) -> str:
    """Replace terminal control characters in a text with escapes. Line breaks and tabs are kept."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def in_one_line(text: str) -> str:
    """Sanitise a text, join its lines and truncate it, so that it cannot forge a line of output."""
    return harmless(" ".join(text.split("\n")))[:_LONGEST_LINE]


class _Console(Console):
    """A console that sanitises its text, and prints nothing once the reader closes the pipe."""

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does. In a pipe, only the cells of tables wrap."""
        if any(isinstance(one, Table) for one in objects):
            options.setdefault("soft_wrap", False)
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a sanitised text as rich does."""
        # The options are passed on unchanged, because they differ between versions of rich.
        return super().render_str(harmless(text), **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Sanitise all text just before it is written, including text that rich generates."""
        encoding = self.encoding
        return super()._render_buffer(
            part if part.control else part._replace(text=_known(harmless(part.text), encoding))
            for part in buffer
        )


def _known(text: str, encoding: str) -> str:
    """Replace characters that the terminal's encoding lacks with escapes."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _console(*, stderr: bool) -> Console:
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    # A tool that displays the output, such as the dashboard, sets the width.
    width = _width(WIDTH)
    return _Console(
        stderr=stderr,
        highlight=False,
        emoji=False,
        markup=False,
        soft_wrap=piped and width is None,
        # In a pipe, COLUMNS limits tables only; on a terminal, rich reads it.
        width=width or ((_width("COLUMNS") or _PIPED_WIDTH) if piped else None),
    )


def _width(variable: str) -> int | None:
    """Return a width from the environment; None if it is not a number from 1 to 99999."""
    shown = os.environ.get(variable, "")
    return int(shown) if shown.isdecimal() and len(shown) < 6 and int(shown) else None


out = _console(stderr=False)
err = _console(stderr=True)

_STYLES = {
    Severity.OK: "green",
    Severity.INFO: "cyan",
    Severity.WARNING: "yellow",
    Severity.BLOCKER: "bold red",
}


def print_json(value: Any, *, line: bool = False) -> None:
    """Print one JSON value to stdout. `line`: print it on one line, as one of several values."""
    sys.stdout.write(as_json(value, indent=None if line else 2) + "\n")
    if line:
        sys.stdout.flush()


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Format a value as JSON. Characters that are unsafe on the terminal are escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8", "surrogatepass")
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    # These characters occur only in strings, as JSON's own syntax has none of them.
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _LogFormatter(logging.Formatter):
    """A formatter that sanitises messages of libraries such as libvirt and ssh."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def log_handler() -> logging.Handler:
    """Return a handler that writes sanitised log messages to stderr."""
    made = logging.StreamHandler()
    made.setFormatter(_LogFormatter("%(relativeCreated)6d ms %(name)s: %(message)s"))
    return made


def say(line: str) -> None:
    """Print one line of progress to stderr, unwrapped."""
    err.print(Text(in_one_line(line)), soft_wrap=True)


def complain(line: str) -> None:
    """Print one error line to stderr."""
    err.print(Text.assemble(("error:", "bold red"), " ", in_one_line(line)), soft_wrap=True)


def findings(console: Console, found: Iterable[Finding]) -> None:
    """Print findings, each with its hint on a second line."""
    for finding in found:
        style = _STYLES[finding.severity]
        console.print(
            Text.assemble(
                (f"{finding.severity:<7}", style),
                f" {in_one_line(finding.where)}: {in_one_line(finding.text)} ",
                (f"({finding.code})", "dim"),
            )
        )
        if finding.hint is not None:
            console.print(Text(f"        → {in_one_line(finding.hint)}"))


class _Table(Table):
    """A table whose rows are one line each, whatever names its cells contain."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row. A line break or a tab in a cell becomes a space."""
        super().add_row(*(_in_one_row(cell) for cell in cells), **options)


def _in_one_row(cell: Any) -> Any:
    if isinstance(cell, str):
        return harmless(_BREAKS.sub(" ", cell))
    if isinstance(cell, Text):
        # A style stays where it is, because each character is replaced by one other.
        cell = cell.copy()
        cell.plain = _BREAKS.sub(" ", cell.plain)
    return cell


def table(*columns: str) -> Table:
    """Create a table without borders. Columns whose name begins with '>' are right-aligned."""
    made = _Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right)
    return made


_STILL = "still stopping; this step cannot be interrupted"


def stop_on_signals(
    first: str, second: str = _STILL, again: asyncio.Event | None = None
) -> asyncio.Event:
    """Return an event that Ctrl-C and SIGTERM set.

    The first signal prints `first`. The second signal prints `second` and sets `again`, if given;
    later signals print that the command is still stopping.
    """
    stop = asyncio.Event()

    def cancel() -> None:
        if not stop.is_set():
            say(first)
            stop.set()
        elif again is None or again.is_set():
            say(_STILL)
        else:
            say(second)
            again.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, cancel)
    return stop
