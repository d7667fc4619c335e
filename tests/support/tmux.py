"""A terminal with a program in it, driven by keys and read as somebody sees it."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vmckpt_lab.machine_speed import Deadline

_RESTS = 3.0
"""Seconds for a program to deal with a key; ours need a tenth of one."""


def _wants_to_run(process: int) -> bool:
    """Whether a thread of a process runs, or would if it had a core."""
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


class Tmux:
    """One terminal, on a server of its own."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def _run(self, *words: str) -> str:
        told = subprocess.run(
            ["tmux", "-S", str(self._socket), *words], capture_output=True, text=True, check=True
        )
        return told.stdout

    def keys(self, *keys: str) -> None:
        """Press keys, as tmux names them, each once the program has dealt with the one before."""
        for key in keys:
            self._run("send-keys", key)
            self._settle()

    def _settle(self) -> None:
        """Wait until the program waits, too: at several looks none of its threads wants to run.

        A program that never rests is given up after a while: the next text to come tells.
        """
        process = int(self._run("display-message", "-p", "#{pane_pid}"))
        give_up, rested = Deadline(_RESTS), 0
        while rested < 4 and not give_up.passed():
            time.sleep(0.03)
            rested = 0 if _wants_to_run(process) else rested + 1

    def type(self, text: str) -> None:
        """Type a text."""
        self._run("send-keys", "-l", text)

    def screen(self, *, colours: bool = False) -> str:
        """What is on the screen."""
        return self._run("capture-pane", "-p", *(("-e",) if colours else ()))

    def until(self, *texts: str, limit: float = 40.0) -> str:
        """Wait for a screen that has all these texts."""
        end = Deadline(limit)
        while True:
            seen = self.screen()
            if all(text in seen for text in texts):
                return seen
            assert not end.passed(), f"{texts} never came:\n{seen}"
            time.sleep(0.1)

    def gone(self, text: str, limit: float = 40.0) -> None:
        """Wait until a text is no longer there."""
        end = Deadline(limit)
        while text in (seen := self.screen()):
            assert not end.passed(), f"{text} stays:\n{seen}"
            time.sleep(0.1)


@contextmanager
def terminal(
    folder: Path, words: Sequence[str], environment: Mapping[str, str], size: tuple[int, int]
) -> Iterator[Tmux]:
    """A program in a terminal of that width and height; gone afterwards."""
    made = Tmux(folder / "tmux")
    width, height = size
    # pytest loads readline, which sets both, and a program believes them more than its terminal.
    there = {key: value for key, value in environment.items() if key not in ("COLUMNS", "LINES")}
    subprocess.run(
        ["tmux", "-S", str(folder / "tmux"), "-f", os.devnull, "new-session", "-d",
         "-x", str(width), "-y", str(height), *words],
        env={**there, "TERM": "xterm-256color", "COLORTERM": "truecolor",
             "LANG": "C.UTF-8"},
        check=True,
    )  # fmt: skip
    try:
        yield made
    finally:
        made._run("kill-server")
