"""Protections by the facade: where a standby goes, and how they stand."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.earlier_protections import FAILED_OVER, KNOWN, past
from tests.support.two_copies import INVENTORY, OVER, WORKS
from tests.tui.still import PROTECT
from vmckpt.app import protection
from vmckpt.app.protection import Request
from vmckpt.errors import BadInput, GuestLocked
from vmckpt.journal import jobs
from vmckpt.journal.records import Operation
from vmckpt.model.host import Host
from vmckpt.protection import agent_client
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.copies import of_protections
from vmckpt.protection.resync import Earlier


async def test_a_primary_is_asked_after_a_backup_that_has_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its guest ended before the standby took over, and after it had answered."""
    rounds: list[list[str]] = []

    async def both(hosts: Mapping[str, Host], *_: object) -> dict[str, ProtectionStatus]:
        rounds.append(list(hosts))
        ours = {**WORKS, "runs": len(rounds) == 1}
        return {name: parse_answer(ours if name == "alpha" else OVER) for name in hosts}

    monkeypatch.setattr(agent_client, "both", both)
    told = await protection.job_status(INVENTORY, PROTECT.operation)
    assert rounds == [["alpha", "beta"], ["alpha"]]
    assert of_protections([told]) == ()


def request(to: str | None, *, reverse: bool = True) -> Request:
    return Request(
        guest="web1", to=to, policy=None, wishes={}, storage=None, dry_run=False, reverse=reverse
    )


@pytest.mark.parametrize(
    ("asked", "known", "host"),
    [
        (request(None), KNOWN, "alpha"),
        (request("alpha"), KNOWN, "alpha"),
        (request("gamma"), None, "gamma"),
        (request("gamma", reverse=False), None, "gamma"),
    ],
)
def test_the_host_is_the_one_before_or_the_one_that_is_named(
    asked: Request, known: Earlier | None, host: str
) -> None:
    assert protection._to(asked, known, "beta") == host


@pytest.mark.parametrize(
    ("asked", "known", "text"),
    [
        (request("gamma"), KNOWN, "guest web1 ran on alpha before, not on gamma"),
        (request(None), None, "the journal contains no protection that moved web1 to beta"),
        (request(None, reverse=False), None, "no host was given for the standby of web1"),
    ],
)
def test_a_host_that_nobody_can_mean_is_refused(
    asked: Request, known: Earlier | None, text: str
) -> None:
    with pytest.raises(BadInput, match=text):
        protection._to(asked, known, "beta")


def journal(monkeypatch: pytest.MonkeyPatch, *found: Operation) -> None:
    """What the journal has of the guest."""

    @contextmanager
    def opened() -> Iterator[Any]:
        yield SimpleNamespace(recent=lambda *_: list(found), steps=lambda _: past(None)[1])

    monkeypatch.setattr(jobs, "open_journal", opened)


def operation(name: str, *, kind: str = "protect", active: bool = False) -> Operation:
    told = SimpleNamespace(
        id=name, kind=kind, active=active, guest="web1", source="alpha", target="beta",
        report=FAILED_OVER[0].report,
    )  # fmt: skip
    return cast("Operation", told)


def test_a_protection_that_has_not_ended_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    journal(monkeypatch, operation("P2", active=True), operation("P1"))
    with pytest.raises(GuestLocked, match=r"protected \(P2\)") as raised:
        protection._earlier("u-1", "beta")
    assert "vmckpt recover" in str(raised.value.hint)


def test_only_protections_count(monkeypatch: pytest.MonkeyPatch) -> None:
    journal(monkeypatch, operation("M3", kind="migrate", active=True), operation("P1"))
    assert protection._earlier("u-1", "beta") == KNOWN
