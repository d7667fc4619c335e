"""Commands of vmckpt in this process, on hosts of libvirt's test driver, and hints followed there.

The test driver can start, stop, save and restore guests. It cannot migrate them.
"""

from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest

from tests.support.following import take
from tests.support.libvirt_nodes import node
from vmckpt.cli import app

ALPHA = "test:///default"
"""The URI of a host with the running guest `test`. All connections of a process see one state."""
_NO_JOB = {"type": libvirt.VIR_DOMAIN_JOB_NONE}
_MEMORY = {"total": 16 << 20, "free": 12 << 20, "cached": 0, "buffers": 0}
"""In KiB."""


class Run:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str]:
        """Return the exit code and all that was printed."""
        self._capsys.readouterr()
        code = app.run(list(words))
        told = self._capsys.readouterr()
        return code, told.out + told.err

    def good(self, *words: str) -> str:
        """Run a command that must end well; what it printed."""
        code, told = self(*words)
        assert code == 0, told
        return told

    def wrong(self, *words: str) -> str:
        """Run a command that must fail; its message."""
        code, told = self(*words)
        assert code, told
        return told

    def follow(self, message: str, *more: str, code: int = 0, **values: str) -> str:
        """Run the commands of the hint in a message; what they printed.

        `more`: further words, such as --yes. `code`: the exit code of each command.
        """
        printed = ""
        for one in take(message, **values):
            assert one.words[0] == "vmckpt"
            ended, told = self(*one.words[1:], *more)
            assert ended == code, told
            printed += told
        return printed


def placed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an inventory with alpha and beta, and a state, in a directory, and work there."""
    monkeypatch.chdir(folder)
    beta = node(folder / "beta", guest=False)
    (folder / "hosts.yaml").write_text(
        f"hosts: {{alpha: {{uri: '{ALPHA}'}}, beta: {{uri: '{beta}'}}}}\n"
    )
    monkeypatch.setenv("VMCKPT_INVENTORY", str(folder / "hosts.yaml"))
    monkeypatch.setenv("VMCKPT_STATE", str(folder / "state"))


def completed_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add to the test driver what an evacuation asks of a host, and keep the state of alpha."""
    monkeypatch.setattr(libvirt.virConnect, "getMemoryStats", lambda *_: _MEMORY)
    monkeypatch.setattr(libvirt.virDomain, "jobStats", lambda *_: _NO_JOB)
    keeper = libvirt.open(ALPHA)
    guest = keeper.lookupByName("test")
    if not guest.isActive():  # a connection of an earlier test has kept the state of alpha, too
        guest.create()
    yield
    keeper.close()
