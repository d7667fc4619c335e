"""The backup's loop, told on a real line what a primary tells it, or what none would."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from tests.support.backing import (
    ONE,
    TWO,
    Following,
    commit,
    following,
    refusal,
    refused_to_run,
    send,
)
from tests.support.replicas import SESSION, SHORT, until
from tests.support.staging import epoch, seal
from vmckpt.replication.backup import redo_log
from vmckpt.replication.control_socket import Request
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.connection import ConnectionLost
from vmckpt.replication.protocol.memory_layout import Dimm, Layout
from vmckpt.replication.protocol.messages import (
    Ack,
    CutOff,
    Digests,
    End,
    Heartbeat,
    Hello,
    HelloAck,
    LayoutAck,
    MemoryLayout,
    PageRequest,
    Pages,
)
from vmckpt.units import Seconds


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Following]:
    with following(monkeypatch) as made:
        yield made


def test_epochs_are_acknowledged_and_are_what_the_standby_is(one: Following) -> None:
    one.begin()
    line, welcome = one.hello()
    assert welcome == HelloAck(session=SESSION, committed=0)
    commit(line, ONE, TWO)
    one.requests.add(Request.END)
    assert one.came() is None
    assert one.world() == TWO.after


def test_an_epoch_that_was_cut_off_never_reaches_the_standby(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    for part in TWO.parts:
        line.send(part)
    line.close()
    one.requests.add(Request.FAILOVER)
    ours = one.came()
    assert ours is not None
    assert "declared the primary dead" in ours.why
    assert one.world() == ONE.after


def test_an_epoch_that_was_sealed_is_had_even_if_nobody_hears_of_it(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    send(line, ONE)
    line.close()
    until(lambda: one.stage.committed == 1)
    one.requests.add(Request.FAILOVER)
    assert one.came() is not None
    assert one.world() == ONE.after


def test_a_primary_that_comes_back_is_told_what_there_is_and_sends_it_again(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    for part in TWO.parts:
        line.send(part)
    line.close()
    line, welcome = one.hello(captured=2)
    assert welcome.committed == 1
    commit(line, epoch(3, ONE.after, base=1))
    one.requests.add(Request.END)
    one.came()
    assert one.world() == epoch(3, ONE.after, base=1).after


def test_a_primary_that_has_captured_nothing_begins_from_nothing(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    line.close()
    _, welcome = one.hello(captured=0)
    assert welcome.committed == 0
    one.requests.add(Request.FAILOVER)
    assert refused_to_run(one)


def test_the_newest_line_counts(one: Following) -> None:
    one.begin()
    old, _ = one.hello()
    commit(old, ONE)
    new, welcome = one.hello(captured=1)
    assert welcome.committed == 1
    # It may end in the middle of a heartbeat.
    with pytest.raises((ConnectionLost, CutOff), match=r"other end closed|was lost|ended"):
        old.expect(Ack, SHORT)
    commit(new, TWO)


def test_a_replayed_epoch_is_refused_by_name(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    line.send(ONE.parts[0])
    assert "a message of epoch 1 arrived, but epoch 1 is already committed" in refusal(line)
    line, welcome = one.hello(captured=1)
    assert welcome.committed == 1
    commit(line, TWO)


def test_an_epoch_that_follows_another_one_is_refused(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    send(line, epoch(3, ONE.after, base=0))
    assert "epoch 3 follows epoch 0, but epoch 1 was committed" in refusal(line)
    assert one.stage.committed == 1


def test_another_session_is_refused(one: Following) -> None:
    one.begin()
    line = one.line()
    line.send(Hello(session="another", captured=0))
    assert "to another protection" in refusal(line)
    one.hello()


def test_what_only_a_backup_says_is_refused(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    line.send(HelloAck(session=SESSION, committed=5))
    assert "the primary sent an unexpected HelloAck" in refusal(line)


@pytest.mark.parametrize("asked", [PageRequest(file=7, first=0, count=1),
                                   PageRequest(file=0, first=11, count=2),
                                   PageRequest(file=-1, first=0, count=2),
                                   PageRequest(file=-1, first=1 << 63, count=1),
                                   PageRequest(file=-1, first=0, count=1 << 20),
                                   PageRequest(file=-3, first=0, count=1)])  # fmt: skip
def test_a_question_about_what_there_is_not_is_refused(one: Following, asked: PageRequest) -> None:
    one.begin()
    line, _ = one.hello()
    line.send(asked)
    refusal(line)
    one.hello()


def test_pages_that_are_damaged_end_the_line_and_not_the_standby(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    line.send(Pages(epoch=1, file=0, data=b"no pages"))
    assert "cannot be decompressed" in refusal(line)
    line, _ = one.hello()
    commit(line, ONE)


def test_an_old_token_is_refused_and_a_newer_one_is_learnt(one: Following) -> None:
    one.begin()
    _, _ = one.hello(token=3)
    assert one.claim.token == 3
    late = one.line(token=2)
    late.send(Hello(session=SESSION, captured=0))
    refusal(late)
    assert one.claim.token == 3


def test_digests_are_told_of_what_the_standby_has(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    one.standby.memory[1].content[2] = 7
    line.send(PageRequest(file=1, first=1, count=3))
    told = line.expect(Digests, SHORT)
    expected = page_codec.digests(one.standby.memory[1].content[1:4])
    assert (told.file, told.first) == (1, 1)
    assert np.frombuffer(told.data, ">u8").tolist() == expected.tolist()


def test_digests_are_told_of_the_standby_s_disks_too(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    one.standby.disks[1].content[700:704] = b"disk"
    line.send(PageRequest(file=-2, first=0, count=1))
    told = line.expect(Digests, SHORT)
    assert (told.file, told.first) == (-2, 0)
    assert told.data == blake3(bytes(one.standby.disks[1].content)).digest(8)


DIMM = Dimm(name="dimm0", size=3 << 12, node=0, slot=0, address=1 << 32)


def test_memory_that_is_plugged_in_is_the_standby_s_and_its_epoch_stays(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    for _ in range(2):  # an agent that has just started asks again
        line.send(MemoryLayout(data=Layout(blocks=(), dimms=(DIMM,)).to_bytes()))
        line.expect(LayoutAck, SHORT)
    assert one.stage.committed == 1
    more = np.full((1, 512), 7, dtype=np.uint64)
    pages = Pages(epoch=2, file=2, data=page_codec.encode(np.array([1]), more, None))
    parts = (*TWO.parts, pages)
    commit(line, replace(TWO, parts=parts, seal=seal(2, 1, list(parts))))
    until(lambda: one.stage.applied)
    assert one.standby.memory[2].content[1].tolist() == [7] * 512


def test_memory_for_which_there_is_no_room_is_refused_and_the_standby_stays(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    one.standby.full = True
    line.send(MemoryLayout(data=Layout(blocks=(), dimms=(DIMM,)).to_bytes()))
    assert "cannot match the guest's: beta has no free memory" in refusal(line)
    line, welcome = one.hello(captured=1)
    assert welcome.committed == 1
    commit(line, TWO)
    line.send(MemoryLayout(data=b"something else"))
    assert "an invalid list of memory blocks" in refusal(line)


def test_the_first_copy_is_in_the_standby_at_once(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    pages = np.full((1, 512), 9, dtype=np.uint64)
    data = page_codec.encode(np.array([4], dtype=np.intp), pages, None)
    line.send(Pages(epoch=0, file=0, data=data))
    line.send(PageRequest(file=0, first=0, count=1))
    line.expect(Digests, SHORT)
    assert one.standby.memory[0].content[4].tolist() == [9] * 512
    assert one.stage.committed == 0


def test_the_primary_ends_it(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    line.send(End(why="the protection has ended"))
    line.expect(End, SHORT)  # else nobody knows whether it was heard
    assert one.came() is None


def test_both_ends_tell_each_other_how_they_stand(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    line.send(Heartbeat(sent=1.0, note=b'{"phase": "protecting"}'))
    until(lambda: one.backup.as_json()["primary"] == {"phase": "protecting"})
    notes: list[dict[str, Any]] = []

    def newest() -> bool:
        found = line.receive(Seconds(0.1))
        if isinstance(found, Heartbeat):
            notes.append(json.loads(found.note))
        return bool(notes) and notes[-1]["committed"] == 1

    until(newest)
    told = notes[-1]
    assert (told["committed"], told["ready"], told["connected"]) == (1, True, True)
    assert "primary" not in told  # or each would tell the other all that it was told, for ever
    assert told["epoch_age_s"] > 0


def test_a_stage_that_fails_ends_it(one: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby that may be half an epoch is worth nothing."""

    def fail() -> None:
        raise OSError(5, "no disk")

    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    until(lambda: one.stage.applied)
    monkeypatch.setattr(one.standby.disks[0], "flush", fail)
    send(line, TWO)
    one.thread.join(5.0)
    assert [str(raised) for raised in one.raised] == [
        "applying epoch 2: Input/output error; run journalctl -k on the standby's host"
    ]


def test_an_epoch_for_which_there_is_no_room_is_refused_and_comes_once_there_is(
    one: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    until(lambda: one.stage.applied)
    with monkeypatch.context() as patch:
        patch.setattr(redo_log, "publish", full)
        send(line, TWO)
        why = refusal(line)
        assert "committing epoch 2: No space left on device" in why
        assert "free some space on the standby's host" in why
        assert "No space left" in str(one.backup.as_json()["says"])
    line, welcome = one.hello(captured=2)
    assert welcome.committed == 1
    commit(line, epoch(3, ONE.after, base=1))
    assert one.raised == []


def test_why_it_refuses_is_heard_by_one_that_still_sends(one: Following) -> None:
    """What is closed while something in it is unread takes along what was said last."""
    one.begin()
    line, _ = one.hello()
    line.send(Pages(epoch=1, file=0, data=b"no pages"))
    for _ in range(200):
        line.send(Heartbeat(sent=1.0, note=b" " * 20_000))
    assert "cannot be decompressed" in refusal(line)
