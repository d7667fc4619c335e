"""Large tables of lab tests: a few cells are in each run of ./check, one in 24 of the others in
./check --all, in a slant over rows and columns, and all of them in bench/tables.py.
"""

import pytest

_PART = 24


def marks(
    row: int, column: int, *, quick: bool, often: bool = False
) -> tuple[pytest.MarkDecorator, ...]:
    """When the cell of a table is tried; `often`: in each ./check --all."""
    if quick:
        return ()
    return (pytest.mark.long,) if often or (row + column) % _PART == 0 else (pytest.mark.campaign,)
