"""Which word of the backup lets an epoch's output out."""

import json
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from vmckpt.replication.primary import acknowledgement
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.messages import Ack, End, Heartbeat, Message, PeerRefused
from vmckpt.replication.status import PrimaryStatus
from vmckpt.units import Seconds


class Words:
    """A line on which these come, one in a second, and nothing after them."""

    sent = 50

    def __init__(self, words: Sequence[Message]) -> None:
        self._left, self.now = [*words], 0.0

    def receive(self, _: Seconds) -> Message | None:
        self.now += 1.0
        return self._left.pop(0) if self._left else None

    def monotonic(self) -> float:
        return self.now


Wait = Callable[..., None]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Waits for epoch 7, no longer than 1.5 s for the backup to take something."""

    def waited(*words: Message) -> None:
        line = Words(words)
        monkeypatch.setattr(acknowledgement, "time", line)
        acknowledgement.await_ack(
            cast("PeerConnection", line),
            7,
            PrimaryStatus(),
            patience=Seconds(1.5),
            meanwhile=lambda: None,
        )

    return waited


def taken(bytes_: int) -> Heartbeat:
    return Heartbeat(sent=1.0, note=json.dumps({"received": bytes_}).encode())


def test_its_own_acknowledgement_counts(wait: Wait) -> None:
    wait(Ack(epoch=7))


@pytest.mark.parametrize("number", [6, 8])
def test_another_epochs_acknowledgement_is_none(wait: Wait, number: int) -> None:
    with pytest.raises(ConnectionLost, match="sent Ack, not the acknowledgement of epoch 7"):
        wait(Ack(epoch=number), Ack(epoch=7))


@pytest.mark.parametrize("word", [PeerRefused(why="no room"), End(why="no room")])
def test_a_backup_that_will_not_go_on_has_not_acknowledged(wait: Wait, word: Message) -> None:
    with pytest.raises(ConnectionLost, match="refused to continue: no room"):
        wait(word, Ack(epoch=7))


def test_one_that_takes_something_is_waited_for(wait: Wait) -> None:
    wait(*(taken(number) for number in range(5)), Ack(epoch=7))


def test_one_that_takes_nothing_is_given_up(wait: Wait) -> None:
    with pytest.raises(ConnectionLost, match=r"received nothing for 1\.5 s"):
        wait(taken(10), taken(10), taken(10), Ack(epoch=7))


def test_one_that_says_it_takes_more_than_was_sent_is_not_believed(wait: Wait) -> None:
    with pytest.raises(ConnectionLost, match=r"received nothing for 1\.5 s"):
        wait(*(taken(number) for number in range(51, 99)), Ack(epoch=7))


@pytest.mark.parametrize("note", [b"[]", b"7", b"{", b"[" * 100_000, b"\xff"])
def test_a_note_without_sense_ends_the_connection_and_not_the_agent(
    wait: Wait, note: bytes
) -> None:
    with pytest.raises(ConnectionLost, match="the backup's status report is not"):
        wait(Heartbeat(sent=1.0, note=note), Ack(epoch=7))


def test_a_number_that_is_none_is_no_progress(wait: Wait) -> None:
    with pytest.raises(ConnectionLost, match="received nothing"):
        wait(*(Heartbeat(sent=1.0, note=b'{"received": 1e400}') for _ in range(3)), Ack(epoch=7))
