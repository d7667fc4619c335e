"""Every target, fuzzed for a little while."""

from pathlib import Path

import pytest

from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.long


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_nothing_is_found_in_a_few_seconds(target: str, tmp_path: Path) -> None:
    result = run(target, 6, keep=tmp_path / "findings")

    assert result.findings == (), result.text
    assert result.executions > 100
