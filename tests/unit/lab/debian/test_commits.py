"""Which commits of a Debian guest's database are missing."""

from vmckpt_lab.debian.commits import Database, acknowledged, judge, longest_gap

TOLD = """error 0.1 connection refused
error 0.6 connection refused
2 1.0
3 1.5
error 2.0 server closed the connection
5 7.0
"""
WHOLE = Database([1, 2, 3, 4, 5], [7, 7, 7, 7], 0)


def wholes(text: str, found: Database) -> dict[str, bool]:
    return {entry.name: entry.whole for entry in judge("db1", text, found).entries}


def test_the_numbers_of_a_file_are_those_whose_lines_are_complete() -> None:
    assert acknowledged(TOLD + "6 7.") == [(2, 1.0), (3, 1.5), (5, 7.0)]


def test_commits_that_no_client_was_told_of_may_be_there() -> None:
    assert wholes(TOLD, WHOLE) == {"commits": True, "balances": True, "pages": True}


def test_an_acknowledged_commit_must_be_there() -> None:
    told = judge("db1", TOLD, Database([2, 5], [7, 7, 7, 7], 0))
    assert not told.whole
    assert told.entries[0].text.startswith("3 acknowledged, 1 of them missing (3)")


def test_a_client_that_was_told_nothing_proves_nothing() -> None:
    assert not wholes("error 0.1 connection refused\n", WHOLE)["commits"]


def test_only_errors_after_the_boot_count() -> None:
    assert judge("db1", TOLD, WHOLE).entries[0].text.endswith("the client had 1 errors")


def test_half_of_a_transaction_and_a_broken_page_are_told() -> None:
    found = Database([2, 3, 5], [7, 7, 7, 8], 2)
    assert wholes(TOLD, found) == {"commits": True, "balances": False, "pages": False}


def test_the_longest_gap_counts_from_the_begin_of_the_window_to_its_end() -> None:
    assert longest_gap(TOLD, 1.2, 8.0) == 5.5
    assert longest_gap(TOLD, 1.2, 1.4) == 1.4 - 1.2
    assert longest_gap(TOLD, 6.9, 20.0) == 13.0
