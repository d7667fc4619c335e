"""How the result of a trial is judged, and how a campaign counts violations."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.model.guest import GuestState
from vmckpt_lab import command_runner, guests, ledger
from vmckpt_lab.chaos.run import Tally
from vmckpt_lab.command_runner import End
from vmckpt_lab.faults import trial
from vmckpt_lab.faults.trial import Ends, Told
from vmckpt_lab.invariants import RUNS, Checker, HostCopy, Together, violations
from vmckpt_lab.ledger import Audit, Entry, Records
from vmckpt_lab.observer import client
from vmckpt_lab.processes import QemuCopy

PART = HostCopy(host="beta", processes=1, state=GuestState.PAUSED, in_parts=True)


def end(report: object, code: int = 0) -> End:
    return End(code, json.dumps(report), "")


@pytest.mark.parametrize(
    ("told", "reported"),
    [
        (Told(hit=True, end=end({"outcome": "lost"})), True),
        (Told(hit=True, end=None, recovered=end([{"outcome": None}, {"outcome": "lost"}])), True),
        (Told(hit=True, end=end({"outcome": "failed", "error": "beta: connection lost"})), False),
        (Told(hit=True, end=None, recovered=end([{"outcome": None, "truth": "none is lost"}])),
         False),
        (Told(hit=True, end=None), False),
    ],
)  # fmt: skip
def test_only_an_outcome_reports_a_loss(told: Told, reported: bool) -> None:
    assert (trial._remains([PART], told) == []) is reported
    assert trial._remains([HostCopy(host="beta")], told) == []


def checker(monkeypatch: pytest.MonkeyPatch) -> Checker:
    """For a guest whose memory ledger is wrong."""
    entry = Entry(name="memory", whole=False, text="1 page checked, 1 wrong")
    monkeypatch.setattr(ledger, "audit", lambda _plan, guest: Audit(guest=guest, entries=(entry,)))
    made = Checker.__new__(Checker)
    vars(made).update(_plan=SimpleNamespace(observer_socket="/x"))
    return made


def ledgers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    image = folder / "image"
    image.touch()
    seen = SimpleNamespace(run=1, highest=9, conflicts=0, forgotten=0)
    monkeypatch.setattr(client, "status", lambda _socket, _guest: seen)
    monkeypatch.setattr(guests, "find", lambda _plan, guest: guest)
    monkeypatch.setattr(guests, "disk_seen_from", lambda _plan, _known, _on: image)
    records = Records(highest=5, whole=5, broken=1)
    monkeypatch.setattr(ledger, "read_records", lambda _image, _run, _told: records)
    made = checker(monkeypatch)
    return [*made.ledgers("web1"), *made.image("web1", "alpha")]


def two_copies(_monkeypatch: pytest.MonkeyPatch, _folder: Path) -> list[str]:
    here, there = QemuCopy("web1", "alpha", 10), QemuCopy("web1", "beta", 20)
    together = Together()
    for number in range(3):
        together.take(dict.fromkeys((here, there), number * (RUNS + 1)), float(number))
    return together.seen


def states_left(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    calm: Any = SimpleNamespace(
        look=lambda _guest: [], settled=lambda _guest, _allowed: [], places=lambda _guest: [],
        ledgers=lambda _guest: [], strays=lambda _guest, _source: [],
    )  # fmt: skip
    scene: Any = SimpleNamespace(guest="web1", source="alpha", plan=None, state=folder, more={})
    failed = Told(hit=True, end=None, recovered=end([], code=13))
    monkeypatch.setattr(command_runner, "run", lambda *_, **__: end([{"job": "m-1"}]))
    return [
        *violations([HostCopy(host="alpha")], allowed=["alpha"]),
        *trial.check_trial(scene, failed, Ends.STAYS, calm).wrong,
        *trial.unsettled(scene),
    ]


@pytest.mark.parametrize(
    ("produced", "count", "field"),
    [
        (ledgers, 3, "ledgers_lost"),
        (two_copies, 1, "two_copies_seen"),
        (states_left, 3, "unknown_states_left"),
    ],
)
def test_a_campaign_recognises_the_violations_that_the_checks_report(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    produced: Callable[[pytest.MonkeyPatch, Path], list[str]],
    count: int,
    field: str,
) -> None:
    """The kind of a violation is recognised by its text, so a new text must be counted as well."""
    tally = Tally(seed=1)
    tally.blame(produced(monkeypatch, tmp_path))
    assert (getattr(tally, field), tally.other_troubles) == (count, 0)
