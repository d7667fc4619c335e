"""What is printed steers no terminal, whatever guests, hosts and errors are called."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from tests.support.steering import EVIL, OWN, STEERING
from vmckpt.cli import output
from vmckpt.cli.progress import panel
from vmckpt.model.finding import Finding, Severity
from vmckpt.units import Seconds


def printed(call: Callable[[], object], console: Console, *, terminal: bool) -> str:
    """What a call makes a console write; colours, which are ours, are taken away."""
    file = io.StringIO()
    before = console._file, console._force_terminal
    console._file, console._force_terminal = file, terminal
    try:
        call()
    finally:
        console._file, console._force_terminal = before
    return OWN.sub("", file.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_and_findings_are_harmless(terminal: bool) -> None:
    finding = Finding(code="x", severity=Severity.BLOCKER, where=EVIL, text=EVIL, hint=EVIL)
    lines = [
        printed(lambda: output.say(EVIL + "\nb"), output.err, terminal=terminal),
        printed(lambda: output.complain(EVIL + "\nb"), output.err, terminal=terminal),
    ]
    told = printed(lambda: output.findings(output.out, [finding]), output.out, terminal=terminal)

    assert all(line.count("\n") == 1 for line in lines)
    for text in (*lines, told):
        assert STEERING.search(text) is None
        assert "\\x1b]0;title\\x07" in text
        assert ":x:[link=http://a]b[/link]\\udcff[/]" in text.replace("\n", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_panels_and_plain_texts_are_harmless(terminal: bool) -> None:
    table = output.table("guest", "host")
    table.add_row(EVIL, "[/nothing]")
    shown = [
        table, EVIL, Text(EVIL), panel(EVIL, EVIL, Seconds(1.0), None),
        f"[bold]{EVIL}[/]",
    ]  # fmt: skip
    for one in shown:
        text = printed(lambda one=one: output.out.print(one), output.out, terminal=terminal)  # type: ignore[misc]  # bound at once

        assert STEERING.search(text) is None
        assert "\\x1b" in text


@settings(max_examples=80)
@given(st.text(st.characters(), max_size=60))
def test_no_text_steers_a_terminal(text: str) -> None:
    assert STEERING.search(output.harmless(text)) is None
    assert "\n" not in output.in_one_line(text)
    assert STEERING.search(output.as_json({text: [text]})) is None
    assert json.loads(output.as_json({text: [text]})) == {text: [text]}


def test_a_text_that_is_harmless_stays_as_it_is() -> None:
    for text in ("guest-1 läuft → β", "a\nb", "100 %", "[x] :smile: {y}"):
        assert output.harmless(text) == text


def test_a_terminal_that_knows_few_characters_is_no_fault() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = output._Console(file=file, width=40)
    console.print("a → ä", markup=False)
    file.seek(0)

    assert file.read() == "a \\u2192 \\xe4\n"


def test_a_log_is_harmless_too() -> None:
    record = logging.LogRecord("a", 10, "f", 1, "host said %s", (EVIL,), None)

    assert STEERING.search(output.log_handler().format(record)) is None


def test_what_is_logged_is_told_by_that() -> None:
    program = (
        "import logging; from vmckpt.cli import app; app.run(['-v', 'policy', 'list']);"
        f" logging.getLogger('libvirt').warning({EVIL!r})"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert "ms libvirt: " in done.stderr
    assert STEERING.search(done.stderr.replace("\n", "")) is None


def table(monkeypatch: pytest.MonkeyPatch, columns: str | None, *, terminal: bool) -> list[str]:
    """The lines of a table with a long name, for this value of COLUMNS."""
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    made = output.table("guest", "host", ">memory")
    made.add_row("w" * 180, "alpha", "1.0 GiB")
    made.add_row("db\n\x1b[1m1\t2", "beta", "2.0 GiB")
    made.add_row(output.styled("red", "a\nb"), "gamma", "3.0 GiB")
    console = output._console(stderr=False)
    return printed(lambda: console.print(made), console, terminal=terminal).splitlines()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("columns", ["80", "100", "200", None])
def test_long_names_and_line_breaks_keep_a_table_in_shape(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, columns: str | None
) -> None:
    lines = table(monkeypatch, columns, terminal=terminal)

    assert len(lines) == 4
    assert max(len(line.rstrip()) for line in lines) <= int(columns or 200)
    assert len({line.index(host) for line, host in zip(lines[1:], HOSTS, strict=True)}) == 1
    assert all(line.rstrip().endswith(" GiB") for line in lines[1:])


HOSTS = ("alpha", "beta", "gamma")


@pytest.mark.parametrize("columns", ["", "0", "wide", "-5", "9999999"])
def test_a_width_that_makes_no_sense_is_ignored(
    monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    lines = table(monkeypatch, columns, terminal=False)

    assert max(len(line.rstrip()) for line in lines) <= 200


def test_a_sentence_in_a_narrow_table_wraps_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    words = [
        "not",
        "ready:",
        "the",
        "guest",
        "is",
        "running",
        "unprotected,",
        "so",
        "its",
        "standby",
        "cannot",
        "take",
        "over",
    ]
    made = output.table("what", "why")
    made.add_row("standby", " ".join(words))
    console = output._console(stderr=False)
    told = printed(lambda: console.print(made), console, terminal=False)

    assert told.split()[3:] == words
    assert max(map(len, told.splitlines())) <= 60
