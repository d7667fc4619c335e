"""The way of a restore: what is asked right before the guest that is there is touched."""

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.support.restore_orders import ID
from tests.support.restore_orders import order as an_order
from tests.support.restoring import ABOUT, ALPHA, PLAN, Side, side
from vmckpt.agent import client
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.restore import replace_file, restore
from vmckpt.agent.restore.files import Images
from vmckpt.agent.restore.restore import Revival
from vmckpt.agent.snapshot import parent_state as snapshot_parent_state
from vmckpt.errors import (
    BadInput,
    HypervisorError,
    OutcomeUnknown,
    StoreDamaged,
    VmckptError,
)
from vmckpt.snapshot.restore.exclusivity import HostAnswer
from vmckpt.snapshot.restore.restore import _Answers
from vmckpt.store import parent_state, tiered_reader
from vmckpt.store.assemble import Source
from vmckpt.store.format.metadata import DiskMake, PrivateFacts
from vmckpt.store.format.private_part import Private

__all__ = ["side"]

DISK = DiskMake(target="vda", format="qcow2", size=1, options="")


class Written(Images):
    def _make(self, disk: DiskMake) -> None:
        os.write(self._file(disk).create(), b"restored")


class Way:
    def images(
        self, order: RestoreOrder, private: Private, reader: Source, channel: ControllerChannel
    ) -> Images:
        return Written(order, private, reader, channel)

    def started_as(self, xml: str) -> str:
        return xml

    def revival(self, *_: object) -> Revival:
        return cast("Revival", None)


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RestoreOrder:
    facts = PrivateFacts(domain_xml="", cpu_xml=None, boot_files=(), ram=(), disks=(DISK,))

    @contextmanager
    def opened(_: RestoreOrder) -> Iterator[tuple[None, Private, None]]:
        yield None, Private(facts=facts, chunks=[], regions=(), files={}), None

    monkeypatch.setattr(restore, "opened", opened)
    monkeypatch.setattr(tiered_reader, "warnings", lambda *_: [])
    (tmp_path / "vda.qcow2").write_text("before")
    return replace(an_order(tmp_path), state=str(tmp_path / "state"), xml="<domain/>")


def files(order: RestoreOrder) -> dict[str, str]:
    folder = Path(order.images["vda"]).parent
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


YES = {"answer": True}


def carried_out(order: RestoreOrder, *answers: dict[str, Any]) -> list[dict[str, Any]]:
    """Restore, with these answers of the controller once it is ready; what the agent said."""
    heard, said = (
        io.StringIO("{}\n" + "".join(json.dumps(a) + "\n" for a in (YES, *answers))),
        io.StringIO(),
    )
    channel = ControllerChannel(heard, said)
    channel.order()
    try:
        restore.restore(order, channel, Way())
    finally:
        told = [json.loads(text) for text in said.getvalue().splitlines()]
    return told


def test_what_is_about_to_be_put_there_is_told_before_anything_is_touched(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "start", lambda *_: None)
    said = carried_out(order, YES, YES)
    asked = next(one["about"] for one in said if one.get("ask") == "make way")
    place = Path(order.images["vda"])
    assert asked == {"made": {"vda": replace_file.mark(place)}, "empty": []}
    assert files(order) == {"vda.qcow2": "restored"}


def test_a_no_to_making_way_leaves_everything(order: RestoreOrder) -> None:
    with pytest.raises(VmckptError, match="is running on beta"):
        carried_out(order, {"refused": "web1 is running on beta"})
    assert files(order) == {"vda.qcow2": "before"}


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (HypervisorError("no", host="alpha"), {"vda.qcow2": "before"}),
        (OutcomeUnknown("who knows", host="alpha"),
         {"vda.qcow2": "restored", f"vda.qcow2.{ID}.old": "before"}),
    ],
)  # fmt: skip
def test_images_are_taken_back_only_from_a_guest_that_is_not_there(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch, error: VmckptError, left: dict[str, str]
) -> None:
    def start(*_: object) -> None:
        raise error

    monkeypatch.setattr(restore, "start", start)
    with pytest.raises(type(error)):
        carried_out(order, YES, YES)
    assert files(order) == left


def test_an_image_that_is_there_is_written_over_only_if_that_was_said(order: RestoreOrder) -> None:
    with pytest.raises(BadInput, match="already exists; overwrite it with --replace"):
        carried_out(replace(order, replace=False), YES)
    aside = replace_file.paths(Path(order.images["vda"]), ID)[1]
    aside.write_text("the only copy")
    with pytest.raises(BadInput, match="was left by an interrupted restore; run vmckpt recover"):
        carried_out(order, YES)
    assert files(order) == {"vda.qcow2": "before", aside.name: "the only copy"}


def test_the_folder_of_one_that_was_killed_is_in_nobodys_way(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "start", lambda *_: None)
    order.folder.mkdir(parents=True)
    (order.folder / "nbd").touch()
    carried_out(order, YES, YES)
    assert not order.folder.exists()


def test_stored_memory_with_an_invalid_header_is_damage_and_no_failed_capture(
    tmp_path: Path,
) -> None:
    part = SimpleNamespace(name="head", size=8, chunks=[0])
    private = SimpleNamespace(facts=SimpleNamespace(stream=[part]), chunks=[b"d"])
    reader = SimpleNamespace(read_many=lambda _: [b"not QEVM"])
    with pytest.raises(StoreDamaged, match="memory cannot be restored") as caught:
        restore.Revival(*cast("Any", (an_order(tmp_path), private, reader, None)))
    assert caught.value.hint == "restore another snapshot"


def test_the_next_snapshot_goes_on_from_what_was_restored(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "start", lambda *_: None)
    folder = Path(order.state) / "lines" / f"{order.guest}-near"
    map_ = np.array([1, 2], dtype=np.uint32)
    with parent_state.Draft(folder) as draft:
        extra = {"epoch": 5, "checkpoint": "s-5", "copy": 7, "disks": {}}
        draft.keep("s-5", [b"d" * 32], {"vda": map_}, extra)
    carried_out(order, YES, YES)  # a fork, or its like
    assert snapshot_parent_state.before(parent_state.load(folder)) == "s-5"
    carried_out(replace(order, follows=True), YES, YES)
    past = parent_state.load(folder)
    assert past is not None
    assert (snapshot_parent_state.before(past), snapshot_parent_state.parent(past)) == (ID, None)
    assert (past.snapshot, past.extra["epoch"], past.extra["copy"]) == ("s-5", 5, None)
    assert past.regions["vda"].map.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("heard", "runs", "replace_", "refused"),
    [
        ([], False, False, None),
        ([], True, True, None),
        ([], True, False, "web1 is running on alpha"),  # somebody has started it meanwhile
        ([HostAnswer(host="beta", runs=True, users={})], False, True, "web1 is running or"),
        ([HostAnswer(host="beta", error="off")], False, True, "does not answer: beta"),
    ],
)
async def test_who_runs_it_is_asked_again_before_it_makes_way(
    side: Side, heard: list[HostAnswer], runs: bool, replace_: bool, refused: str | None
) -> None:
    side.heard += heard
    side.runs = runs
    answers = _Answers(side.work(end_running=replace_), PLAN, {"alpha": ALPHA})
    told = await answers("make way", ABOUT)
    if refused is None:
        assert told == {"answer": True}
        assert side.notes.steps == ["make way"]
        assert side.ended == ([PLAN.uuid] if runs else [])
    else:
        assert refused in told["refused"]
        assert (side.notes.steps, side.ended) == ([], [])


@pytest.mark.parametrize("ends", [True, False])
async def test_a_failure_after_the_guest_was_ended_says_so(
    side: Side, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    side.runs = ends

    async def carried_out(*given: Any) -> None:
        await given[4]("make way", ABOUT)
        raise HypervisorError("alpha: no network default", host="alpha")

    monkeypatch.setattr(client, "run_order", carried_out)
    work = side.work(end_running=True)
    with pytest.raises(HypervisorError) as caught:
        await work.run(PLAN, (), {}, {}, {})
    assert ("web1 was stopped for the restore and is off" in str(caught.value)) == ends
    assert ("virsh start web1 on alpha" in str(caught.value)) == ends
