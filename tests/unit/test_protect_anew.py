"""Another standby for a guest that has one."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt import inventory
from vmckpt.errors import BadInput
from vmckpt.journal.records import Controller, Operation
from vmckpt.model.callers import Caller
from vmckpt.model.findings import Finding, Severity
from vmckpt.policy.protection import Failover, Protection
from vmckpt.protect import anew, ending, engine
from vmckpt.protect.anew import Anew
from vmckpt.protect.ending import Ended, Known
from vmckpt.protect.requests import Protected, ProtectRequest
from vmckpt.units import Seconds

HOSTS = inventory.parse(
    "hosts:\n"
    + "".join(f"  {one}: {{uri: 'test:///{one}'}}\n" for one in ("alpha", "beta", "gamma")),
    Path("hosts.yaml"),
)
TERMS = Protection(interval=Seconds(0.1), failover=Failover.AUTOMATIC, lease=Seconds(2.0))
OPERATION = Operation(
    id="p-1", kind="protect", guest="web1", guest_uuid="u-1", source="alpha", target="beta",
    policy=None, mode=None, state="running", phase=None, outcome=None, asked_by="eve@desk",
    asked_from=None, controller=Controller(host="alpha", pid=1, started=0, boot=""), began_at=0.0,
    ended_at=None, detail={"automatic": True, "terms": TERMS.as_json()}, report=None,
)  # fmt: skip
"""Protected on beta, by words of its own."""


def wanted(operation: Operation = OPERATION) -> Anew:
    known = Known(
        operation=operation, primary=HOSTS.host("alpha"), backup=HOSTS.host("beta"), lease=None,
        session="s",
    )  # fmt: skip
    return Anew(known=known, backup=HOSTS.host("gamma"), lease="postgresql://db",
                usual=Protection(slowdown=0.3))  # fmt: skip


def test_it_is_protected_on_the_terms_that_it_was() -> None:
    asked = wanted().request
    assert (asked.guest, asked.to, asked.terms) == ("u-1", "gamma", TERMS)
    old = replace(OPERATION, detail={"automatic": True})  # of a version that kept less
    assert wanted(old).request.terms == Protection(slowdown=0.3, failover=Failover.AUTOMATIC)
    assert Protection.from_json(Protection().as_json()) == Protection()


def blocker(code: str, where: str) -> Finding:
    return Finding(code=code, severity=Severity.BLOCKER, where=where, text="no", mend=None)


async def test_what_the_present_standby_holds_on_the_guests_host_is_nothing_against_it(
    monkeypatch: pytest.MonkeyPatch, deaf: Caller
) -> None:
    against = [blocker("memory-short", "gamma"), blocker("qemu-version", "alpha")]
    found = (blocker("memory-short", "alpha"), blocker("tmpfs-short", "alpha"), *against)

    async def looked(_: object, request: ProtectRequest, *__: object) -> Protected:
        assert request.dry_run
        return protected(found)

    monkeypatch.setattr(engine, "protect", looked)

    assert await anew.check(wanted(), deaf) == against


def protected(findings: tuple[Finding, ...] = ()) -> Protected:
    return Protected(
        guest="web1", primary="alpha", backup="gamma", session="", job="p-2", automatic=True,
        findings=findings, took=Seconds(1.0), status=None,
    )  # fmt: skip


@pytest.fixture
def deaf() -> Caller:
    return Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())


@pytest.mark.parametrize("runs_on", ["alpha", "beta"])
async def test_the_next_one_begins_where_the_guest_still_runs(
    monkeypatch: pytest.MonkeyPatch, deaf: Caller, runs_on: str
) -> None:
    done: list[str] = []

    async def unprotect(*_: object) -> Ended:
        done.append("unprotect")
        return Ended(guest="web1", runs_on=runs_on, why="asked for", took=Seconds(1.0))

    async def protect(*_: object) -> Protected:
        done.append("protect")
        return protected()

    monkeypatch.setattr(ending, "unprotect", unprotect)
    monkeypatch.setattr(engine, "protect", protect)
    if runs_on == "alpha":
        assert (await anew.move(wanted(), deaf)).job == "p-2"
        assert done == ["unprotect", "protect"]
    else:  # it had failed over
        with pytest.raises(BadInput, match="runs on beta since a failover"):
            await anew.move(wanted(), deaf)
        assert done == ["unprotect"]
