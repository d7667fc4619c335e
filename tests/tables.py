"""Large tables of lab tests: a few cells are in each run of ./check, a quarter of the others, of
each row and column, in ./check --all, and all of them in bench/tables.py.
"""

import pytest


def marks(row: int, column: int, *, quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    """When the cell of a table is tried."""
    if quick:
        return ()
    return (pytest.mark.long,) if (row + column) % 4 == 0 else (pytest.mark.campaign,)
