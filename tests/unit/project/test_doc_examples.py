"""The form of example output: what may differ, and what may not."""

import pytest

from tests.support.doc_examples import Example, difference, form

SHOWN = (
    "web1: completed, alpha → beta (hybrid)",
    "total, forecast  3.5 s to 6.4 s …",
    "pass   began  lasted  dirty rate",
    "   1  507 ms   2.8 s           –",
    "   2   3.3 s  281 ms    19 MiB/s",
    "at 3.4 s: switch to post-copy, because …",
)
NOW = """web1: completed, alpha → beta (hybrid)
total, forecast  1 min 05 s (missed)

pass  began  lasted  dirty rate
   1   2 ms   9.8 s           –
   2  9.3 s  281 ms    19 MiB/s
   3  9.9 s    1 ms   200 KiB/s
at 9.5 s: switch to post-copy, because pass 3 has begun
"""


def compared(printed: str, *shown: str) -> str:
    return difference(Example("page.md", 7, "vmckpt migrate web1", shown or SHOWN), printed)


def test_values_and_the_number_of_rows_may_differ() -> None:
    assert compared(NOW) == ""


@pytest.mark.parametrize(
    ("now", "then"),
    [("completed", "failed"), ("dirty rate", "written"), ("lasted  ", ""), ("at 9.5 s", "now")],
)
def test_other_words_are_found(now: str, then: str) -> None:
    told = compared(NOW.replace(now, then))
    assert told.startswith("page.md:7: vmckpt migrate web1\n")
    assert then in told


def test_a_line_more_or_less_is_found() -> None:
    assert compared(NOW + "warning: no further attempt\n") != ""
    assert compared("\n".join(NOW.split("\n")[:-2])) != ""


def test_lines_may_be_left_out_of_a_page() -> None:
    assert compared(NOW, SHOWN[0], "…", SHOWN[-1]) == ""
    assert compared(NOW, "…") == ""
    assert compared(NOW, "…", "web1: failed") != ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("beta   up     9.0.0    7.2.22     2  24 GiB", "beta up N N N N"),
        ("s-kj4e2vezzepljlzf  2026-11-27 04:31  91 MiB", "ID TIME N"),
        ("ok  alpha: /var/cache: 61 GiB free", "ok alpha: PATH: N free"),
        ("clock differs by 12 ms (±48 ms)", "clock differs by N (N)"),
        ("1 host, 2 hosts", "N host, N host"),
        ("ssh to 198.18.94.11:22: refused", "ssh to ADDRESS: refused"),
        ("web1: post-copy", "web1: post-copy"),
    ],
)
def test_the_form_of_a_line(line: str, expected: str) -> None:
    assert form(line) == expected
