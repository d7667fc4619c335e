"""The backup's end of the lease, with a witness whose answers a test gives."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.replicas import until
from tests.support.staging import in_memory
from vmckpt.errors import VmckptError
from vmckpt.lease.client import Denied, LeaseView, TakenOver, TakeOver, Wait
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication.backup import lease_claimant as lease_claimants
from vmckpt.replication.backup.lease_claimant import LeaseClaim, ManualClaim
from vmckpt.replication.session import Lease
from vmckpt.units import Seconds

TTL = 0.08
LEASE = cast(
    "Lease", SimpleNamespace(url="x", ttl=TTL, terms=SimpleNamespace(limit=Seconds(0.1)))
)  # fmt: skip


class Client:
    """What the witness says; whoever asks it is noted."""

    def __init__(self) -> None:
        self.answer: TakeOver | VmckptError = Wait(Seconds(0.0))
        self.holder, self.token = "alpha", 3
        self.silent = False
        self.looks = 0
        self.asked: list[int] = []
        self.closed = False
        self.who: tuple[Any, ...] = ()

    def made(self, url: str, *, holder: str, limit: Seconds) -> "Client":
        self.who = (url, holder, limit)
        return self

    def look(self) -> LeaseView:
        self.looks += 1
        if self.silent:
            raise LeaseUnreachable("the witness gave no answer")
        return LeaseView(
            guest="g", session="s", state="protected", token=self.token, holder=self.holder,
            ttl=Seconds(TTL), margin=Seconds(0.02), age=Seconds(0.0), rest=Seconds(0.0),
        )  # fmt: skip

    def take_over(self, token: int) -> TakeOver:
        self.asked.append(token)
        if isinstance(self.answer, VmckptError):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as made:
        yield made


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(lease_claimants, "LeaseClient", made.made)
    return made


@pytest.fixture
def claim(client: Client, folder: Path) -> Iterator[LeaseClaim]:
    del client
    made = LeaseClaim(LEASE, "beta", folder)
    yield made
    made.close()


def test_the_newest_token_is_the_primary_s_and_no_older_one(folder: Path) -> None:
    tokens = ManualClaim(folder)
    assert [tokens.takes(token) for token in (1, 4, 3, 4, 5)] == [True, True, False, True, True]
    assert tokens.token == 5


def test_a_new_agent_knows_the_newest_token(folder: Path) -> None:
    ManualClaim(folder).takes(7)
    new = ManualClaim(folder)
    assert new.token == 7
    assert not new.takes(6)
    assert [path.name for path in folder.iterdir()] == ["token"]


@pytest.mark.parametrize("text", ["", "x"])
def test_a_token_that_is_none_is_the_first(folder: Path, text: str) -> None:
    (folder / "token").write_text(text)
    assert ManualClaim(folder).token == 1


def test_without_a_lease_store_there_is_nobody_to_ask(folder: Path) -> None:
    tokens = ManualClaim(folder)
    assert tokens.ask() is None
    assert "no lease store" in tokens.says


def test_the_holder_is_watched_all_the_time(claim: LeaseClaim, client: Client) -> None:
    until(lambda: client.looks > 3)
    assert client.who == ("x", "beta", Seconds(0.1))
    assert claim.patience < TTL


def test_a_witness_that_is_silent_is_told_of_and_asked_again(
    claim: LeaseClaim, client: Client
) -> None:
    client.silent = True
    until(lambda: "no answer" in claim.says)
    looks = client.looks
    until(lambda: client.looks > looks + 1)


def test_it_is_asked_with_the_newest_token_and_what_it_gives_is_ours(
    claim: LeaseClaim, client: Client
) -> None:
    claim.takes(3)
    client.answer = TakenOver(4)
    assert claim.ask() == "took over the lease with token 4"
    assert client.asked == [3]
    assert claim.token == 4
    assert not claim.takes(3)


def test_while_the_primary_s_lease_runs_it_is_asked_again_and_not_all_the_time(
    claim: LeaseClaim, client: Client
) -> None:
    client.answer = Wait(Seconds(0.5))
    assert claim.ask() is None
    assert claim.says == "the lease cannot be taken over for another 0.50 s"
    for _ in range(5):
        assert claim.ask() is None
    assert len(client.asked) == 1
    client.answer = TakenOver(2)
    until(lambda: claim.ask() is not None)


def test_the_end_of_a_lease_is_not_slept_through(claim: LeaseClaim, client: Client) -> None:
    """What is left of it is shorter than the time between two looks."""
    claim._every = 60.0
    client.answer = Wait(Seconds(0.03))
    assert claim.ask() is None
    client.answer = TakenOver(2)
    until(lambda: claim.ask() is not None)


def test_what_is_denied_is_said(claim: LeaseClaim, client: Client) -> None:
    client.answer = Denied("the standby is not valid")
    assert claim.ask() is None
    assert claim.says == "the lease cannot be taken over: the standby is not valid"
    assert claim.token == 1


def test_what_the_primary_has_handed_over_is_ours(claim: LeaseClaim, client: Client) -> None:
    claim.takes(2)
    client.answer = Denied("the standby has token 2, the lease has 3")
    client.holder, client.token = "beta", 3
    assert claim.ask() == "the lease was handed over with token 3"
    assert claim.token == 3


@pytest.mark.parametrize("holder", ["alpha", None, "gamma"])
def test_what_somebody_else_holds_is_not_ours(
    claim: LeaseClaim, client: Client, holder: Any
) -> None:
    client.answer = Denied("no")
    client.holder = holder
    assert claim.ask() is None


def test_without_an_answer_it_is_told_and_the_next_question_waits(
    claim: LeaseClaim, client: Client
) -> None:
    claim._every = 60.0
    client.answer = LeaseUnreachable("the witness gave no answer")
    with pytest.raises(LeaseUnreachable):
        claim.ask()
    assert claim.ask() is None
    assert len(client.asked) == 1


def test_closed_it_asks_nobody_any_more(client: Client, folder: Path) -> None:
    made = LeaseClaim(LEASE, "beta", folder)
    made.close()
    looks = client.looks
    assert client.closed
    assert not made._thread.is_alive()
    assert client.looks == looks
