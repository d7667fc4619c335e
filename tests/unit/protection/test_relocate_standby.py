"""Another standby for a guest that has one."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt import inventory
from vmckpt.errors import BadInput, Blocked, RemoteError, VmckptError
from vmckpt.journal.records import ControllerIdentity, Operation
from vmckpt.model.disk import Room
from vmckpt.model.events import Caller
from vmckpt.model.finding import Finding, Severity
from vmckpt.policy.model import Failover, Protection
from vmckpt.protection import relocate_standby, start, stop
from vmckpt.protection.agent_status import parse_answer
from vmckpt.protection.relocate_standby import Relocation
from vmckpt.protection.request import Protected, ProtectRequest
from vmckpt.protection.stop import Known, StopResult
from vmckpt.units import MIB, Bytes, Seconds

HOSTS = inventory.parse(
    "hosts:\n"
    + "".join(f"  {one}: {{uri: 'test:///{one}'}}\n" for one in ("alpha", "beta", "gamma")),
    Path("hosts.yaml"),
)
TERMS = Protection(interval=Seconds(0.1), failover=Failover.AUTOMATIC, lease=Seconds(2.0))
OPERATION = Operation(
    id="p-1", kind="protect", guest="web1", guest_uuid="u-1", source="alpha", target="beta",
    policy=None, mode=None, state="running", phase=None, outcome=None, asked_by="eve@desk",
    asked_from=None, controller=ControllerIdentity(host="alpha", pid=1, started=0, boot=""),
    began_at=0.0, ended_at=None, detail={"automatic": True, "terms": TERMS.as_json()}, report=None,
)  # fmt: skip
"""Protected on beta, by words of its own."""
ROOM = Room(device="8:1", folder="/srv", free=Bytes(9), needed=Bytes(5), grown=Bytes(5))


def wanted(operation: Operation = OPERATION) -> Relocation:
    known = Known(
        operation=operation, primary=HOSTS.host("alpha"), backup=HOSTS.host("beta"), lease=None,
        session="s",
    )  # fmt: skip
    return Relocation(known=known, backup=HOSTS.host("gamma"), lease="postgresql://db",
                usual=Protection(slowdown=0.3), memory=Bytes(MIB))  # fmt: skip


def test_it_is_protected_on_the_terms_that_it_was() -> None:
    asked = wanted().request
    assert (asked.guest, asked.to, asked.terms) == ("web1", "gamma", TERMS)
    old = replace(OPERATION, detail={"automatic": True})  # of a version that kept less
    assert wanted(old).request.terms == Protection(slowdown=0.3, failover=Failover.AUTOMATIC)
    assert Protection.from_json(Protection().as_json()) == Protection()


async def test_what_the_present_standby_holds_is_free_by_then(
    monkeypatch: pytest.MonkeyPatch, deaf: Caller
) -> None:
    against = Finding(
        code="qemu-version", severity=Severity.BLOCKER, where="gamma", text="no", hint=None
    )

    async def looked(_: object, request: ProtectRequest, *__: object) -> Protected:
        assert (request.dry_run, request.held) == (True, MIB)
        return protected((against,))

    monkeypatch.setattr(start, "protect", looked)
    found = await relocate_standby.require_relocatable(wanted(), deaf)

    assert found.findings[0] == against
    assert [one.code for one in found.findings[1:]] == [
        "no-standby"
    ]  # a warning: until it is copied


def protected(findings: tuple[Finding, ...] = (), job: str | None = "p-2") -> Protected:
    return Protected(
        guest="web1", primary="alpha", backup="gamma", session="", job=job, automatic=True,
        findings=findings, took=Seconds(1.0), status=None, rooms=(ROOM,),
    )  # fmt: skip


@pytest.fixture
def deaf() -> Caller:
    return Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())


@pytest.mark.parametrize("runs_on", ["alpha", "beta"])
async def test_the_next_one_begins_where_the_guest_still_runs(
    monkeypatch: pytest.MonkeyPatch, deaf: Caller, runs_on: str
) -> None:
    done: list[str] = []

    async def unprotect(*_: object) -> StopResult:
        done.append("unprotect")
        return StopResult(guest="web1", runs_on=runs_on, why="requested", took=Seconds(1.0))

    async def protect(*_: object) -> Protected:
        done.append("protect")
        return protected()

    monkeypatch.setattr(stop, "unprotect", unprotect)
    monkeypatch.setattr(start, "protect", protect)
    if runs_on == "alpha":
        assert (await relocate_standby.move(wanted(), deaf)).job == "p-2"
        assert done == ["unprotect", "protect"]
    else:  # it had failed over
        with pytest.raises(BadInput, match="failed over to beta and has no standby"):
            await relocate_standby.move(wanted(), deaf)
        assert done == ["unprotect"]


async def test_what_fails_once_the_old_one_has_ended_is_tried_again_and_then_said(
    monkeypatch: pytest.MonkeyPatch, deaf: Caller
) -> None:
    monkeypatch.setattr(relocate_standby, "_AGAIN", 0.0)
    no = Finding(
        code="memory-short", severity=Severity.BLOCKER, where="alpha", text="no room", hint=None
    )
    answers: list[Protected | VmckptError] = [
        RemoteError("gamma: no answer"), protected((no,), None), protected(),
    ]  # fmt: skip
    said: list[str] = []

    async def unprotect(*_: object) -> StopResult:
        return StopResult(guest="web1", runs_on="alpha", why="requested", took=Seconds(1.0))

    async def protect(*_: object) -> Protected:
        answer = answers.pop(0)
        if isinstance(answer, VmckptError):
            raise answer
        return answer

    monkeypatch.setattr(stop, "unprotect", unprotect)
    monkeypatch.setattr(start, "protect", protect)
    caller = replace(deaf, warn=said.append)

    assert (await relocate_standby.move(wanted(), caller)).job == "p-2"
    assert said == [
        "web1 has no standby: gamma: no answer; retrying",
        "web1 has no standby: alpha: no room; retrying",
    ]
    answers[:] = [protected((no,), None)] * 3
    with pytest.raises(Blocked, match="alpha: no room"):
        await relocate_standby.move(wanted(), caller)


def test_a_first_copy_that_does_not_get_on_is_given_up() -> None:
    clock = iter([0.0, 0.0, 100.0, 219.0, 221.0])
    told = relocate_standby.progressing(lambda: next(clock))
    for left in (9, 8, 8):
        told(parse_answer({"phase": "copying", "pages_left": left}))
    with pytest.raises(VmckptError, match=r"made no progress for .*: no room"):
        told(parse_answer({"phase": "copying", "pages_left": 8, "says": "no room"}))


def test_a_first_copy_whose_primary_cannot_be_asked_says_why() -> None:
    clock = iter([0.0, 0.0, relocate_standby.STANDS_STILL + 1.0])
    told = relocate_standby.progressing(lambda: next(clock))
    told(parse_answer({"error": "alpha is silent"}))
    with pytest.raises(VmckptError, match=r"made no progress for .*: alpha is silent"):
        told(parse_answer({"error": "alpha is silent"}))


def test_the_same_by_hand_is_a_command() -> None:
    assert wanted().words == (
        "vmckpt protect web1 --to gamma --failover automatic --interval 100ms"
    )


def test_what_it_takes_of_its_host_is_known_and_not_told_as_an_answer() -> None:
    """Whoever gives several guests a standby there adds it up."""
    found = protected()
    assert found.disks_bytes == 5
    assert found.as_json()["disks_bytes"] == 5
    assert "rooms" not in found.as_json()
