"""docs/locking.md holds the table that the lab tests try."""

from collections import Counter

from tests.lab import locking_table
from tests.lab.locking_table import CELLS
from tests.lab.locking_words import Under


def test_the_document_has_the_table_that_is_tried() -> None:
    assert locking_table.table() in locking_table.DOCUMENT.read_text()


def test_no_cell_is_there_twice_and_every_row_has_some() -> None:
    twice = [one for one, count in Counter(map(str, CELLS)).items() if count > 1]

    assert twice == []
    assert {cell.under for cell in CELLS} == set(Under)


def test_a_few_cells_are_tried_in_every_run() -> None:
    assert 4 <= sum(cell.quick for cell in CELLS) <= 8
