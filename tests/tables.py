"""Large tables of lab tests: a few cells are in each run of ./check, every third of the others in
./check --all, and all of them in bench/tables.py.
"""

import pytest


def marks(number: int, *, quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    """When the cell of that number in its table is tried."""
    if quick:
        return ()
    return (pytest.mark.long,) if number % 3 == 0 else (pytest.mark.campaign,)
