"""vmckpt snapshot restore: what is said of a guest that is back."""

import pytest

from tests.support.restored import RESTORED
from vmckpt.cli.snapshot import restore as cli_snapshot_restore


def test_a_guest_that_is_paused_is_not_told_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    cli_snapshot_restore._show(RESTORED, paused=True)
    cli_snapshot_restore._show(RESTORED, paused=False)
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert ("is back, paused," in first, "web1 runs on alpha" in second) == (True, True)
