"""What the fuzzer starts from, and all that it ever found: read once more, without the fuzzer."""

import time
from pathlib import Path

import pytest

from tests.fuzz.run import CORPUS, FINDINGS
from tests.fuzz.targets import TARGETS

INPUTS = sorted(path for place in (CORPUS, FINDINGS) for path in place.glob("*/*"))


def test_every_target_has_something_to_start_from() -> None:
    assert {path.parent.name for path in INPUTS} == set(TARGETS)


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_no_input_is_too_much(path: Path) -> None:
    begun = time.process_time()

    TARGETS[path.parent.name](path.read_bytes())

    assert time.process_time() - begun < 5
