"""An agent goes before ordinary processes, and so does its session if nobody else is in it."""

import subprocess
import sys
from pathlib import Path

import pytest

from vmckpt.replication.priority import NICE

GROUP = Path("/proc/self/autogroup")
PROGRAM = """
import os
from pathlib import Path
from vmckpt.replication import priority
priority.raise_own()
group = Path("/proc/self/autogroup")
print(os.getpriority(os.PRIO_PROCESS, 0), group.read_text() if group.exists() else "")
"""


def _nice(group: str) -> str:
    """The nice value of an autogroup; empty for a process that a cgroup keeps out of autogroups."""
    return group.rsplit(maxsplit=1)[-1] if group.split() else ""


@pytest.mark.parametrize("alone", [True, False])
def test_its_session_is_raised_only_if_it_is_its_own(alone: bool) -> None:
    before = _nice(GROUP.read_text()) if GROUP.exists() else ""
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, start_new_session=alone
    )
    nice, _, group = done.stdout.removesuffix("\n").partition(" ")
    assert int(nice) == NICE < 0
    if before:
        assert _nice(group) == (str(NICE) if alone else before)
        assert _nice(GROUP.read_text()) == before
