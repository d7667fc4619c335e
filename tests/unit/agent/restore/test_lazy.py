"""Images that begin empty, with their content behind them, and what is done without a guest."""

import json
import subprocess
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.restore_orders import ID, channel, order
from tests.support.stocking import page
from vmckpt.agent.cleanup_orders import DiscardOrder, FinishOrder
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.restore import files, lazy, lazy_server
from vmckpt.agent.restore.lazy import LazyServerClient
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput, HypervisorError, StoreDamaged
from vmckpt.hypervisor import connection, qemu_user
from vmckpt.units import Seconds
from vmckpt.util import host_directories

CONTENT = page(3, 1 << 20) + bytes(1 << 20) + page(4, 1 << 20)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sockets and orders are."""
    monkeypatch.setattr(host_directories, "RUN", tmp_path / "run")
    monkeypatch.setattr(qemu_user, "owner", lambda _uri, _host: (-1, -1))
    return tmp_path / "run"


def overlay(told: RestoreOrder, socket: str) -> None:
    base = f"nbd+unix:///vda?socket={socket}"
    words = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", base]
    subprocess.run([*words, told.images["vda"]], check=True)


def test_an_image_is_completed_without_its_guest(tmp_path: Path, run: Path) -> None:
    told = order(tmp_path)
    export = Export(size=len(CONTENT), read=lambda at, length: CONTENT[at : at + length])
    with ExitStack() as stack:
        folder = lazy_server._furnished(told)
        keeper = lazy_server._Keeper(told, channel(), {"vda": export})
        keeper.listen(stack)
        overlay(told, keeper.sockets["vda"])
        assert not keeper._is_whole("vda")
        keeper._finish_off("vda")
        assert keeper._is_whole("vda")
    raw = tmp_path / "raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", told.images["vda"], str(raw)], check=True)
    assert raw.read_bytes() == CONTENT
    assert folder.stat().st_mode & 0o777 == 0o711
    assert (folder / "order.json").stat().st_mode & 0o777 == 0o600
    Path(told.images["vda"]).unlink()
    assert keeper._is_whole("vda"), "an image that was taken away is waited for by nobody"


LOCKED = 'qemu-img: Failed to get "write" lock\nIs another process using the image?'
FULL = "qemu-img: error while writing at offset 0: No space left on device\n"


def test_only_an_image_in_use_is_tried_again(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure for another reason ends the server, and leaves the job to recovery."""
    answers = [LOCKED, LOCKED, FULL]

    def rebase(words: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "", answers.pop(0))

    def off(_keeper: object, _name: str, _done: int) -> None:
        raise HypervisorError("no domain", host="alpha", code=connection.NOT_HERE[0])

    monkeypatch.setattr(subprocess, "run", rebase)
    monkeypatch.setattr(lazy_server, "_AGAIN", Seconds(0.0))
    monkeypatch.setattr(lazy_server._Keeper, "_pull", off)
    monkeypatch.setattr(lazy_server._Keeper, "_is_whole", lambda _keeper, _name: not answers)
    export = Export(size=1, read=lambda _at, _length: b"")
    keeper = lazy_server._Keeper(order(tmp_path), channel(), {"vda": export})
    with pytest.raises(HypervisorError, match=r"vda cannot be filled.*No space left") as raised:
        keeper.run()
    assert not answers
    assert not raised.value.undone


def test_an_image_whose_data_cannot_be_read_is_reported(tmp_path: Path, run: Path) -> None:
    def unreadable(_at: int, _length: int) -> bytes:
        raise OSError("the store is away")

    told = order(tmp_path)
    with ExitStack() as stack:
        lazy_server._furnished(told)
        export = Export(size=len(CONTENT), read=unreadable)
        keeper = lazy_server._Keeper(told, channel(), {"vda": export})
        keeper.listen(stack)
        overlay(told, keeper.sockets["vda"])
        with pytest.raises(HypervisorError, match="cannot be filled: qemu-img"):
            keeper._finish_off("vda")


def test_recovery_starts_another_server_after_a_server_has_failed(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(LazyServerClient):
        def __enter__(self) -> NoReturn:
            raise HypervisorError("disk vda cannot be filled", host="alpha")

    served = [True, True, False]
    monkeypatch.setattr(lazy_server, "is_served", lambda _guest: served.pop(0))
    monkeypatch.setattr(lazy, "LazyServerClient", Failing)
    lazy_server._furnished(order(tmp_path))
    heard = channel()
    give_up = threading.Timer(10.0, heard.stop.set)
    give_up.start()
    with pytest.raises(HypervisorError, match="cannot be filled"):
        lazy.finish(FinishOrder(guest="u-1", host="alpha"), heard)
    give_up.cancel()


def test_what_a_keeper_was_told_is_kept_for_the_next_one(tmp_path: Path, run: Path) -> None:
    assert lazy_server.kept("u-1") is None
    told = order(tmp_path)
    folder = lazy_server._furnished(told)
    kept = lazy_server.kept("u-1")
    assert kept is not None
    assert (kept["do"], RestoreOrder.from_json(kept)) == ("serve", told)
    look = FinishOrder(guest="u-1", host="alpha", dry=True)
    assert lazy.finish(look, channel()) == {"waits": True, "whole": False}
    assert lazy.finish(replace(look, guest="u-2"), channel()) == {"waits": False, "whole": True}
    (folder / "order.json").write_text("{")
    with pytest.raises(BadInput, match=r"order\.json is invalid"):
        lazy_server.kept("u-1")


def test_a_snapshot_without_memory_is_nothing_to_be_lazy_for(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be restored lazily"):
        lazy.restore_lazily(order(tmp_path), channel())


def said(keeper: LazyServerClient, *lines: object) -> None:
    keeper._process = subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert keeper._process.stdin is not None
    keeper._process.stdin.write("".join(json.dumps(line) + "\n" for line in lines))
    keeper._process.stdin.close()


def ended(keeper: LazyServerClient) -> None:
    assert keeper._process.stdout is not None
    keeper._process.stdout.close()
    keeper._process.wait()


def test_a_keeper_is_listened_to() -> None:
    keeper = LazyServerClient({}, "alpha")
    said(keeper, {"ask": "ready", "about": {"sockets": {"vda": "/x"}}}, {"progress": {}},
         {"done": {}})  # fmt: skip
    keeper.wait_ready()
    assert keeper.sockets == {"vda": "/x"}
    assert keeper.watch(channel())
    ended(keeper)
    said(keeper, {"progress": {}})
    assert not keeper.watch(channel())
    ended(keeper)
    said(keeper, {"error": {"kind": "StoreDamaged", "message": "gone", "mend": None}})
    with pytest.raises(StoreDamaged, match="gone"):
        keeper.wait_ready()
    ended(keeper)


def test_a_forks_images_are_taken_away_also_half_made(tmp_path: Path) -> None:
    place = tmp_path / "fork-vda.qcow2"
    for name in (place.name, f"{place.name}.{ID}.new", "other"):
        (tmp_path / name).touch()
    told = DiscardOrder(snapshot=ID, images={"vda": str(place)})
    assert files.discard(DiscardOrder.from_json(told.as_json()), channel()) == {"removed": 2}
    assert files.discard(told, channel()) == {"removed": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
