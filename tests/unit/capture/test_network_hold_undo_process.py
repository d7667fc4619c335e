"""The process beside held output lets it go if nobody else does."""

import json
import os
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from vmckpt.capture import network_hold, network_hold_undo_process
from vmckpt.capture.network_hold import HoldUndo
from vmckpt.errors import HostUnreachable
from vmckpt.hypervisor import qmp
from vmckpt.hypervisor.qemu_process import identity

UNDO = HoldUndo(guest="u-1", cards=("net0",), runs=True)


@pytest.fixture
def let_go(monkeypatch: pytest.MonkeyPatch) -> list[tuple[HoldUndo, bool]]:
    """What was let go, and whether the guest was to be resumed with it."""
    did: list[tuple[HoldUndo, bool]] = []

    class Monitor:
        def __init__(self, guest: str, *, host: str, uri: str) -> None:
            assert (guest, host, uri) == ("u-1", "alpha", "")

        def __enter__(self) -> "Monitor":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(qmp, "QmpMonitor", Monitor)
    monkeypatch.setattr(
        network_hold, "put_back", lambda _, facts, *, resume: did.append((facts, resume))
    )
    return did


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes | None], int]]:
    """Run it with these words of the cut, after which the cut is gone; None: it says "held" and
    no more. The exit status."""
    kept, ends = os.dup(0), list[int]()

    def run(words: bytes | None) -> int:
        ours, theirs = os.pipe()
        os.dup2(ours, 0)
        os.close(ours)
        os.write(theirs, b"h" if words is None else words)
        ends.append(theirs) if words is None else os.close(theirs)
        undo = {"undo": UNDO.to_json(), "limit": 0.05 if words is None else 30.0}
        facts = json.dumps({"uri": "", "host": "alpha", "undo": json.dumps(undo)})
        monkeypatch.setattr("sys.argv", ["", facts])
        try:
            network_hold_undo_process.main()
        except SystemExit as exc:
            return cast("int", exc.code)
        return 0

    yield run
    os.dup2(kept, 0)
    for one in (kept, *ends):
        os.close(one)


Told = Callable[[bytes | None], int]
LetGo = list[tuple[HoldUndo, bool]]


@pytest.mark.parametrize("words", [b".", b"h."])
def test_a_cut_that_ended_well_needs_nothing(told: Told, let_go: LetGo, words: bytes) -> None:
    assert (told(words), let_go) == (0, [])


@pytest.mark.parametrize("words", [b"", b"h"])
def test_what_a_dead_cut_held_is_let_go(told: Told, let_go: LetGo, words: bytes) -> None:
    assert (told(words), let_go) == (0, [(UNDO, False)])


def test_one_that_hangs_is_not_waited_for_and_its_guest_goes_on(told: Told, let_go: LetGo) -> None:
    assert (told(None), let_go) == (0, [(UNDO, True)])


@pytest.mark.parametrize(("runs", "status"), [(True, 1), (False, 0)])
def test_without_libvirt_only_a_qemu_that_has_ended_holds_nothing(
    told: Told, let_go: LetGo, monkeypatch: pytest.MonkeyPatch, runs: bool, status: int
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise HostUnreachable("alpha: no", host="alpha")

    monkeypatch.setattr(qmp, "QmpMonitor", unreachable)
    monkeypatch.setattr(identity, "runs", lambda _: runs)
    monkeypatch.setattr(network_hold_undo_process, "_BETWEEN", 0.001)
    assert (told(b""), let_go) == (status, [])
