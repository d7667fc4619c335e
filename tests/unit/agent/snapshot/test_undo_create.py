"""What is done when a snapshot goes wrong: the guest first, and the job stays open if it must."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from vmckpt.agent.orders import PutBackOrder
from vmckpt.agent.protocol import error_from_json
from vmckpt.agent.snapshot import spool, undo_create
from vmckpt.agent.snapshot.create import SnapshotCreator
from vmckpt.capture.disks import live
from vmckpt.capture.disks.live import DiskUndo
from vmckpt.capture.memory import background_snapshot, memory_files
from vmckpt.capture.memory.undo_process import left_behind
from vmckpt.capture.migration_settings import Undo
from vmckpt.errors import (
    Cancelled,
    CaptureFailed,
    HypervisorError,
    RemoteError,
    StoreError,
    VmckptError,
)
from vmckpt.journal import recorder as journal
from vmckpt.journal.recorder import recorded
from vmckpt.journal.records import NewOperation
from vmckpt.model.disk import StorePlace
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.repository import Store
from vmckpt.units import Seconds


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to the guest."""
    did: list[str] = []

    class There:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> "There":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(undo_create, "QmpMonitor", There)
    monkeypatch.setattr(background_snapshot, "undo_capture", lambda *_: did.append("capture"))
    monkeypatch.setattr(memory_files, "sweep", lambda: None)
    monkeypatch.setattr(live, "put_back", lambda *_, published: did.append(f"backup {published}"))
    return did


def put_back(state: Path, url: str, id_: str | None = None) -> dict[str, Any]:
    undo = Undo(guest="u", capabilities={}, bandwidth=1, runs=True, folder="")
    backup = DiskUndo(guest="u", snapshot="s-1", socket="/s", files=())
    order = PutBackOrder(
        guest="u", uri="", host="alpha", store=StorePlace(name="near", url=url, id=id_),
        state=str(state), snapshot="s-1", capture=undo.to_json(), backup=backup.to_json(),
        freeze=None,
    )  # fmt: skip
    order.folder.mkdir(parents=True)
    return undo_create.put_back(order)


def test_the_guest_is_put_back_though_the_store_is_away(tmp_path: Path, done: list[str]) -> None:
    with pytest.raises(StoreError, match="the snapshot's changes to the guest were undone; "):
        put_back(tmp_path, "/nowhere/store")
    assert done == ["capture", "backup None"]
    assert not (tmp_path / "spool" / "s-1").exists()


def test_another_store_that_lies_there_is_not_asked(tmp_path: Path, done: list[str]) -> None:
    Store.create(LocalFolder(tmp_path / "other"))
    with pytest.raises(StoreError, match=r"changes to the guest were undone; .* is not the store"):
        put_back(tmp_path, str(tmp_path / "other"), "the-right-one")
    assert done == ["capture", "backup None"]


@pytest.mark.parametrize(("published", "more"), [(True, []), (False, ["backup False"])])
def test_a_checkpoint_goes_only_if_the_snapshot_is_not_there(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch, published: bool,
    more: list[str],
) -> None:  # fmt: skip
    class Ids:
        id = "s-1"

        def manifests(self) -> list["Ids"]:
            return [self] if published else []

    monkeypatch.setattr(Store, "open", lambda *_, **__: Ids())
    assert put_back(tmp_path, str(tmp_path)) == {"published": published}
    assert done == ["capture", "backup None", *more]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (CaptureFailed("broke off"), ["failed"]),
        (Cancelled("stopped"), ["cancelled"]),
        (RemoteError("no word"), []),
        (left_behind(CaptureFailed("broke off")), []),
        (left_behind(Cancelled("stopped")), []),
        (error_from_json({"kind": "Cancelled", "message": "", "undone": False}, "a"), []),
    ],
)
def test_a_job_is_closed_only_if_all_was_undone(
    monkeypatch: pytest.MonkeyPatch, error: VmckptError, outcome: list[str]
) -> None:
    told: list[str] = []

    class Recorder:
        def acquire(self, _: str) -> None: ...

        def finish(self, outcome: object, _: object) -> None:
            told.append(str(outcome))

        def close(self) -> None: ...

    monkeypatch.setattr(journal, "begin", lambda *_: Recorder())
    new = NewOperation(kind="snapshot", guest="web1", guest_uuid="u", source="alpha", detail={})

    async def run() -> None:
        async with recorded(new, "u", lambda _: None):
            raise error

    with pytest.raises(type(error)):
        asyncio.run(run())
    assert told == outcome


def test_what_fails_after_the_publication_is_a_warning() -> None:
    work = SnapshotCreator.__new__(SnapshotCreator)
    work._warnings = []
    ran: list[int] = []

    def full() -> None:
        raise OSError(28, "No space left on device")

    def gone() -> None:
        raise HypervisorError("alpha: gone", host="alpha")

    def held() -> None:
        raise left_behind(None)

    work._afterwards(full, gone, lambda: ran.append(1))
    assert ran == [1]
    assert [one.partition(": ")[0] for one in work._warnings] == [
        "the next snapshot may need a full read"
    ] * 2
    with pytest.raises(CaptureFailed):
        work._afterwards(held)


def test_memory_that_a_dead_agent_left_is_removed(tmp_path: Path) -> None:
    for name in ("s-dead", "s-alive", "restore-s-dead"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ram-0").write_bytes(b"secret")
    with spool.held(tmp_path / "s-alive", patience=Seconds(0.0)):
        spool.sweep(tmp_path)
        left = sorted(one.name for one in tmp_path.iterdir())
    assert left == ["restore-s-dead", "s-alive", "s-alive.lock"]
