"""Large tables of lab tests: a few cells are in each run of ./check, an eighth of the others in
./check --all, in a slant over rows and columns, and all of them in bench/tables.py.
"""

import pytest


def marks(row: int, column: int, *, quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    """When the cell of a table is tried."""
    if quick:
        return ()
    return (pytest.mark.long,) if (row + column) % 8 == 0 else (pytest.mark.campaign,)
