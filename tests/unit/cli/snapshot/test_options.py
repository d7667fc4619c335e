"""What snapshot commands share: passphrases, questions, and how far long work is."""

import getpass
import io
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.fixtures.make_store_v1 import PASSPHRASE
from tests.support.stocking import Stock, stock
from vmckpt.cli.snapshot import options
from vmckpt.errors import BadInput, Cancelled, KeyRefused
from vmckpt.model.events import Copied, PhaseChanged
from vmckpt.model.migration import JobPhase
from vmckpt.units import MIB, Bytes

__all__ = ["stock"]


def test_a_passphrase_comes_from_a_file_that_only_its_owner_reads(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.encrypt()
    bob = str(stock.identity("bob"))
    told = (stock.folder / "bob.key").read_text()
    assert "vmckpt-admin-locked" in told
    stock.put("before", [1])
    monkeypatch.setenv("VMCKPT_IDENTITY", bob)

    code, _, wrong = stock("diff", "before", "before")
    assert (code, "stdin is not a terminal; set VMCKPT_PASSPHRASE_FILE" in wrong) == (43, True)
    file = stock.folder / "pass"
    file.write_text("wrong\n")
    monkeypatch.setenv("VMCKPT_PASSPHRASE_FILE", str(file))
    code, _, wrong = stock("diff", "before", "before")
    assert (code, "chmod 600" in wrong) == (43, True)
    file.chmod(0o600)
    assert "wrong passphrase" in stock("diff", "before", "before")[2]
    file.write_text(f"{PASSPHRASE}\n")
    code, _, wrong = stock("diff", "before", "before")
    assert (code, "is not encrypted for this identity" in wrong) == (43, True)


def test_a_passphrase_is_asked_for_twice(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["one", "two", "same", "same", "same"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(getpass, "getpass", lambda _: next(answers))
    monkeypatch.setattr("vmckpt.store.keys.identity.create.__kwdefaults__", {"cost": 10})

    code, _, wrong = stock("keys", "new", "key")
    assert (code, "passphrases differ; nothing was written" in wrong) == (43, True)
    code, told, _ = stock("keys", "new", "key")
    assert (code, "vmckpt-admin-locked" in (stock.folder / "key").read_text()) == (0, True)
    assert stock("keys", "add", "me", told.strip())[0] == 0
    stock.put("one", [1])
    assert stock("verify", "--deep", "--identity", "key")[0] == 0


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def copied(done: int, *, phase: str = "store", new: int = 0) -> Copied:
    return Copied(phase=phase, done=Bytes(done * MIB), total=Bytes(100 * MIB), new=Bytes(new * MIB))


def test_long_work_is_a_line_a_second_with_its_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(options, "time", clock)
    ticker = options.Ticker()
    for at, event in (
        (0.0, copied(1)), (0.9, copied(5)), (2.0, copied(20, new=3)), (2.5, copied(30)),
        (4.0, PhaseChanged(phase=JobPhase.SETUP)), (4.0, copied(50, phase="capture")),
        (6.0, copied(70, phase="capture")),
    ):  # fmt: skip
        clock.now = 100.0 + at
        ticker.take(event)
    clock.now = 106.5
    ticker.count(1, 9)
    clock.now = 107.0
    ticker.count(2, 9)
    assert capsys.readouterr().err.splitlines() == [
        "    2.0s store: 20 MiB of 100 MiB, 3.0 MiB new, 10 MiB/s",
        "    4.0s capture: 50 MiB of 100 MiB",  # a rate over no time is a guess
        "    6.0s capture: 70 MiB of 100 MiB, 35 MiB/s",
        "    7.0s 2 of 9",
    ]


def test_who_does_not_say_yes_or_cannot_be_asked_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options.sure("delete it?", yes=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    why = "delete it: stdin is not a terminal, so no confirmation is possible; nothing was changed"
    with pytest.raises(BadInput, match=why):
        options.sure("delete it?", yes=False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for answer, agreed in (("y\n", True), ("n\n", False), ("\n", False)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        with nullcontext() if agreed else pytest.raises(Cancelled, match="nothing was changed"):
            options.sure("delete it?", yes=False)


def test_a_passphrase_is_the_first_line_of_the_file_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(options.PASSPHRASE, raising=False)
    assert options.given_passphrase() is None
    file = tmp_path / "pass"
    monkeypatch.setenv(options.PASSPHRASE, str(file))
    with pytest.raises(KeyRefused, match="no such file"):
        options.given_passphrase()
    file.write_text("two words \r\nmore\n")
    file.chmod(0o600)
    assert options.given_passphrase() == options.chosen_passphrase() == "two words "
