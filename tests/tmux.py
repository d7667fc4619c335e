"""A terminal with a program in it, driven by keys and read as somebody sees it."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vmckpt.lab.pace import Deadline


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
        """Press keys, as tmux names them."""
        for key in keys:
            self._run("send-keys", key)
            time.sleep(0.15)

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
    subprocess.run(
        ["tmux", "-S", str(folder / "tmux"), "-f", os.devnull, "new-session", "-d",
         "-x", str(width), "-y", str(height), *words],
        env={**environment, "TERM": "xterm-256color", "COLORTERM": "truecolor",
             "LANG": "C.UTF-8"},
        check=True,
    )  # fmt: skip
    try:
        yield made
    finally:
        made._run("kill-server")
