"""Who undoes a capture that its own process cannot undo, and what is told of that."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.migrating import Qemu
from vmckpt.agent.protocol import error_as_json, error_from_json
from vmckpt.agent.snapshot import spool
from vmckpt.capture import migration_settings
from vmckpt.capture.memory import background_snapshot, undo_process
from vmckpt.capture.memory.background_snapshot import Hooks
from vmckpt.capture.memory.undo_process import UndoProcess
from vmckpt.errors import CaptureFailed, GuestLocked, HostUnreachable, HypervisorError, StoreError
from vmckpt.hypervisor import qmp as qmps
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.units import Seconds

UNDO = migration_settings.Undo(guest="u", capabilities={}, bandwidth=1, runs=True, folder="")
Make = Callable[..., UndoProcess]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A keeper that ends as it is told to, after a while."""
    (tmp_path / "pretending.py").write_text(
        "import json, os, sys, time\n"
        "facts = json.loads(json.loads(sys.argv[1])['undo'])\n"
        "if os.read(0, 1) == b'.': sys.exit(0)\n"
        "time.sleep(facts['after'])\n"
        "sys.exit(facts['status'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def made(status: int, after: float = 0.0, held: Sequence[int] = ()) -> UndoProcess:
        undo = json.dumps({"status": status, "after": after})
        return UndoProcess(uri="", host="", undo=undo, stream=None, held=held, module="pretending")

    return made


def test_only_who_undid_it_all_sends_it_away(make: Make) -> None:
    with make(1) as well:
        well.all_well()
    with pytest.raises(StoreError, match="full"), make(0):
        raise StoreError("full")
    with pytest.raises(CaptureFailed) as caught, make(1):
        raise StoreError("full")
    assert not caught.value.undone
    assert str(caught.value) == (
        "full; some changes made by the capture could not be undone; run vmckpt recover"
    )


def test_the_lock_is_held_until_it_has_ended(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "spool" / "s-1"
    process = os.fork()
    if not process:
        with spool.held(folder, patience=Seconds(0.0)) as lock, make(0, 1.0, (lock,)):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    with pytest.raises(GuestLocked), spool.held(folder, patience=Seconds(0.0)):
        pass
    with spool.held(folder, patience=Seconds(20.0)):
        pass


class Gone(Qemu):
    """libvirt goes while the stream comes, and for good or for a while."""

    def __init__(self, back: bool) -> None:
        super().__init__("none")
        self.pipe = -1
        self.broken, self.back = False, back

    def _there(self) -> None:
        if self.broken:
            raise HostUnreachable("alpha: libvirt cannot be reached", host="alpha")

    def ask(self, command: str, **more: object) -> Any:
        self._there()
        return super().ask(command, **more)

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        self._there()
        super().tell(command, arguments)
        if command == "getfd":
            self.pipe = os.dup(files[0])
        if command == "migrate":
            self.broken = True
            os.write(self.pipe, b"no stream")
            os.close(self.pipe)

    def given_up(self) -> None:
        self.broken = not self.back


@pytest.mark.parametrize("back", [True, False])
def test_without_libvirt_the_keeper_is_asked_to_undo_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    qemu = Gone(back)
    given: list[object] = []

    def undo_process_for(*words: object) -> UndoProcess:
        given.extend(words)
        return make(1)

    monkeypatch.setattr(background_snapshot, "undo_process_for", undo_process_for)
    hooks = Hooks(
        note=lambda _: None, barrier=lambda: None, given_up=qemu.given_up, held=(7,)
    )  # fmt: skip
    with pytest.raises(Exception, match=r".") as caught:
        background_snapshot.capture(qemu, tmp_path / "image", hooks)
    told: Any = caught.value
    assert getattr(told, "undone", True) is back
    assert (qemu.state, qemu.capabilities["background-snapshot"]) == (
        ("running", False) if back else ("paused", True)
    )
    assert not (tmp_path / "image").exists()
    assert given[-1] == (7,), "the snapshot's lock is the keeper's, too"


@pytest.mark.parametrize(
    ("failures", "process", "well"), [(3, 1, True), (99, 1, False), (99, None, True)]
)
def test_it_tries_over_connections_of_its_own_for_a_while(
    monkeypatch: pytest.MonkeyPatch, failures: int, process: int | None, well: bool
) -> None:
    """A QEMU that has ended needs nothing any more."""
    opened: list[str] = []

    class Monitor:
        def __init__(self, guest: str, **_: object) -> None:
            opened.append(guest)
            if len(opened) <= failures:
                raise HostUnreachable("alpha: no", host="alpha")

        def __enter__(self) -> "Monitor":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    undone: list[object] = []
    monkeypatch.setattr(qmps, "QmpMonitor", Monitor)
    monkeypatch.setattr(migration_settings, "give_up", lambda *_, **__: undone.append(1))
    monkeypatch.setattr(identity, "runs", lambda _: process is not None)
    monkeypatch.setattr(undo_process, "_TURN", 0.01)
    monkeypatch.setattr(undo_process, "LASTS", 0.2)
    assert undo_process._undo("", "alpha", UNDO.to_json()) is well
    assert bool(undone) == (failures == 3)
    assert (len(opened) > 3) == (process is not None)


def test_what_is_left_is_told_through_whatever_came_after() -> None:
    left = undo_process.left_behind(HypervisorError("alpha: gone", host="alpha"))
    for last in (left, StoreError("and the store, too")):
        try:
            try:
                raise left
            finally:
                if last is not left:
                    raise last
        except (CaptureFailed, StoreError) as exc:
            told = error_from_json(json.loads(json.dumps(error_as_json(exc))), "alpha")
        assert (type(told), told.undone) == (type(last), False)
    assert error_from_json({"kind": "StoreError", "message": "an older agent"}, "alpha").undone
