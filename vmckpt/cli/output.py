"""Where output goes: results to stdout, everything else to stderr; Ctrl-C and SIGTERM.

Names, errors and what hosts say are others' words: what would steer a terminal in them is shown
(as "\\x1b"), never sent.
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

# Into a pipe or a file nothing is wrapped: a line stays a line for grep.
_PIPED_WIDTH = 200
WIDTH = "VMCKPT_WIDTH"
_LONGEST_LINE = 4000
# Control characters, what turns the direction of writing, other line ends, halves of characters.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def styled(style: str, text: str) -> Text:
    """A text of ours or others', in a style; nothing in it is taken for markup."""
    return Text(harmless(text), style)


def harmless(text: str) -> str:
    """A text without what would steer a terminal; line breaks stay."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def in_one_line(text: str) -> str:
    """As `harmless`, and no line breaks: nobody's name can look like a line of ours."""
    return harmless(" ".join(text.split("\n")))[:_LONGEST_LINE]


class _Console(Console):
    """A console whose reader may go away: what runs goes on without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does it, but for what is not ours in the text."""
        # The options are rich's own; which there are differs between its versions.
        return super().render_str(harmless(text), **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """The last place before the terminal: text that never was a string of ours, too."""
        encoding = self.encoding
        return super()._render_buffer(
            part if part.control else part._replace(text=_known(harmless(part.text), encoding))
            for part in buffer
        )


def _known(text: str, encoding: str) -> str:
    """What the terminal has no character for is shown by its number."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _console(*, stderr: bool) -> Console:
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    # Whoever shows it to people, as the dashboard does, says how wide that is.
    shown = os.environ.get(WIDTH, "")
    width = int(shown) if shown.isdecimal() and int(shown) else None
    return _Console(
        stderr=stderr,
        highlight=False,
        emoji=False,
        markup=False,
        soft_wrap=piped and width is None,
        width=width or (_PIPED_WIDTH if piped else None),
    )


out = _console(stderr=False)
err = _console(stderr=True)

_STYLES = {
    Severity.OK: "green",
    Severity.INFO: "cyan",
    Severity.WARNING: "yellow",
    Severity.BLOCKER: "bold red",
}


def print_json(value: Any, *, line: bool = False) -> None:
    """One JSON value on stdout; of several, each is a line."""
    sys.stdout.write(as_json(value, indent=None if line else 2) + "\n")
    if line:
        sys.stdout.flush()


def as_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that can be read as it is, without what would steer a terminal."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8", "surrogatepass")
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    # JSON itself has none of these: they stand in strings.
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _LogFormatter(logging.Formatter):
    """For what libraries log: libvirt's and ssh's words."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def log_handler() -> logging.Handler:
    """Writes to stderr what is logged, without what would steer a terminal."""
    made = logging.StreamHandler()
    made.setFormatter(_LogFormatter("%(relativeCreated)6d ms %(name)s: %(message)s"))
    return made


def say(line: str) -> None:
    """One line of progress on stderr, as it is, whatever the terminal's width."""
    err.print(Text(in_one_line(line)), soft_wrap=True)


def complain(line: str) -> None:
    """One line of complaint on stderr."""
    err.print(Text.assemble(("error:", "bold red"), " ", in_one_line(line)), soft_wrap=True)


def findings(console: Console, found: Iterable[Finding]) -> None:
    """Findings, one paragraph each, with what to do about them."""
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


def table(*columns: str) -> Table:
    """A table without lines; columns that begin with '>' are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right)
    return made


_STILL = "still stopping; it cannot be left half done"


def stop_on_signals(
    first: str, second: str = _STILL, again: asyncio.Event | None = None
) -> asyncio.Event:
    """Set by Ctrl-C and SIGTERM, which say `first`; the next ones say `second`, and set `again`."""
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
