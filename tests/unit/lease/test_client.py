"""What a host makes of the lease store's answers, by a clock that the test moves."""

from collections.abc import Sequence
from typing import Any

import pytest

from vmckpt.lease import client as lease_client
from vmckpt.lease.client import Denied, LeaseClient, TakenOver, Wait
from vmckpt.units import Seconds


class Store:
    """A lease store that takes its time; each answer is one that the test has put there."""

    def __init__(self) -> None:
        self.now, self.takes = 100.0, 0.0
        self.answers: list[dict[str, Any]] = []
        self.asked: list[tuple[object, ...]] = []

    def line(self, *_: object, **__: object) -> "Store":
        return self

    def ask(self, statement: str, arguments: Sequence[object] = ()) -> dict[str, Any]:
        self.now += self.takes
        self.asked.append((statement, *arguments))
        return self.answers.pop(0)

    def clock(self) -> Seconds:
        return Seconds(self.now)

    def sees(self, client: LeaseClient, beat: str) -> None:
        """The client looks, and that is the beat."""
        told = ("guest", "session", "state", "token", "holder", "ttl", "margin", "age", "rest")
        self.answers.append({**dict.fromkeys(told), "said": "done", "beat": beat})
        client.look()

    def watched(self, client: LeaseClient) -> tuple[object, object]:
        """The beat and the time for which the client says that it saw it."""
        self.answers.append({"said": "denied", "why": "not valid"})
        assert client.take_over(3) == Denied("not valid")
        return self.asked[-1][-2], self.asked[-1][-1]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(lease_client, "LeaseConnection", made.line)
    return made


@pytest.fixture
def client(store: Store) -> LeaseClient:
    return LeaseClient("", holder="beta", clock=store.clock)


def test_a_renewal_counts_from_when_it_was_sent(store: Store, client: LeaseClient) -> None:
    """The store has written it before it answers; the holder must end before others may begin."""
    store.takes = 3.0
    store.answers.append({"said": "done"})
    assert client.renew(3) == 100.0


def test_a_renewal_that_is_refused_is_a_lost_lease(store: Store, client: LeaseClient) -> None:
    store.answers.append({"said": "lost"})
    assert client.renew(3) is None


def test_a_host_that_has_never_looked_has_watched_for_no_time(
    store: Store, client: LeaseClient
) -> None:
    assert store.watched(client) == ("", 0.0)


def test_a_host_has_watched_since_the_answer_that_first_had_the_last_renewal(
    store: Store, client: LeaseClient
) -> None:
    store.takes = 1.0
    store.sees(client, "first")
    store.now += 10.0
    store.sees(client, "second")
    store.now += 4.0
    store.sees(client, "second")
    store.now += 2.0
    assert store.watched(client) == ("second", 4.0 + 1.0 + 2.0)


def test_a_takeover_that_must_wait_begins_to_watch(store: Store, client: LeaseClient) -> None:
    store.takes = 1.0
    store.answers.append({"said": "wait", "rest": 1.5, "beat": "first"})
    assert client.take_over(3) == Wait(Seconds(1.5))
    store.now += 2.0
    assert store.watched(client) == ("first", 2.0)


def test_what_was_taken_over_has_a_new_token(store: Store, client: LeaseClient) -> None:
    store.answers.append({"said": "done", "token": 4})
    assert client.take_over(3) == TakenOver(4)
