"""A disk whose write log a real nbdkit serves."""

from collections.abc import Iterator

import pytest

from tests.support.disk_logs import Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as made:
        yield made
