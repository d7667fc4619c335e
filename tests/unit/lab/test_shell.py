import os
import signal
import threading
from pathlib import Path
from types import FrameType

import pytest

from vmckpt_lab.shell import run


def children() -> set[str]:
    listed = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
    return set(listed.read_text().split())


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def test_what_we_ran_has_ended_when_we_are_interrupted() -> None:
    before, handler = children(), signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(["sleep", "30"])
        assert children() == before
    finally:
        signal.signal(signal.SIGALRM, handler)
