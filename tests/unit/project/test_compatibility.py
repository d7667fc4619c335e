"""What goes between versions is written as the release before wrote it."""

import json
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.wire_samples import samples

_KEPT = ROOT / "tests/fixtures/wire.json"


def test_orders_answers_messages_and_files_are_as_they_were(tmp_path: Path) -> None:
    """What is new may be added to the file; what is there must stay: others read it."""
    assert samples(tmp_path) == json.loads(_KEPT.read_text())
