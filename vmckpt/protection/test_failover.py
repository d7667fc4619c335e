"""Test a failover: run a copy of the standby while the protection continues."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vmckpt.errors import Cancelled, GuestLocked, OutcomeUnknown, VmckptError
from vmckpt.model.events import Caller
from vmckpt.protection import agent_client
from vmckpt.protection.stop import Known
from vmckpt.units import Seconds

_TURN = 0.1
_BEGINS = Seconds(300.0)
_ENDS = Seconds(60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedFailover:
    """A failover test that is running or has ended."""

    guest: str
    name: str
    """The copy's name."""
    uuid: str
    host: str
    epoch: int | None
    """The epoch from which the copy was made."""
    age: Seconds | None
    """The age of that epoch when the copy started."""
    look: tuple[str, ...]
    """Commands to inspect the copy."""
    end: tuple[str, ...]
    """Commands to destroy the copy; any one of them is sufficient."""
    took: Seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "guest": self.guest, "name": self.name, "uuid": self.uuid, "host": self.host,
            "epoch": self.epoch, "age_s": self.age, "look": list(self.look),
            "end": list(self.end), "took": self.took,
        }  # fmt: skip


async def begin(known: Known, caller: Caller) -> TestedFailover:
    """Start a test. Returns once the copy is running.

    Setting `caller.stop` cancels the test. Raises Cancelled, VmckptError. A copy can be left only
    after OutcomeUnknown, or after RemoteError.
    """
    began = time.monotonic()
    told = await _wish(known, "test")
    said = ""
    while told["state"] == "copying":
        if (says := _progress(told)) != said:
            said = says
            caller.warn(f"{known.backup.name}: {says}")
        if caller.stop.is_set() or time.monotonic() - began > _BEGINS:
            await end(known, caller)
            if caller.stop.is_set():
                raise Cancelled(f"stopped: no copy of {known.operation.guest} is running")
            raise VmckptError(
                f"{known.backup.name}: the test copy did not start within {_BEGINS:g} s and was"
                " removed",
                hint="try again when that host is less busy",
            )
        await asyncio.sleep(_TURN)
        found = _test(await agent_client.order(known.backup, known.uuid, "ask"))
        if found is None:
            raise VmckptError(
                f"{known.backup.name}: the failover test ended before its copy was running",
                hint=f"run vmckpt status {known.operation.guest}",
            )
        told = found
    if told["state"] != "runs":
        raise VmckptError(f"{known.backup.name}: the failover test failed: {told.get('why')}")
    return _tested(known, told, Seconds(time.monotonic() - began))


async def end(known: Known, caller: Caller) -> TestedFailover:
    """End a test. Returns once the copy is completely removed.

    Raises OutcomeUnknown, VmckptError.
    """
    began = time.monotonic()
    before = _test(await agent_client.order(known.backup, known.uuid, "ask"))
    told = await _wish(known, "end-test", none=before)
    while (left := _test(await agent_client.order(known.backup, known.uuid, "ask"))) is not None:
        if left["state"] == "failed" and left["uuid"] == told["uuid"]:
            caller.warn(f"{known.backup.name}: {left.get('why')}")
            break
        if time.monotonic() - began > _ENDS:
            raise OutcomeUnknown(
                f"{told['name']} has not been removed from {known.backup.name} yet",
                host=known.backup.name,
                hint=f"run vmckpt status {known.operation.guest}",
            )
        await asyncio.sleep(_TURN)
    return _tested(known, told, Seconds(time.monotonic() - began))


async def _wish(
    known: Known, wish: str, *, none: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Pass a request to the backup's agent. Returns the state of the test.

    `none`: returned if the agent reports no test. Raises GuestLocked if the agent refuses.
    """
    answer = await agent_client.order(known.backup, known.uuid, "ask", wish=wish)
    if "error" in answer:
        raise GuestLocked(str(answer["error"]))
    if not answer.get("agent"):
        raise GuestLocked(
            f"{known.operation.guest} has no standby on {known.backup.name} that can be tested:"
            f" {answer.get('why') or answer.get('says') or 'the host has no record of a standby'}",
            hint=f"run vmckpt status {known.operation.guest}",
        )
    found = _test(answer) or none
    if found is None:
        raise VmckptError(
            f"the standby's agent on {known.backup.name} is too old for failover tests",
            hint="run vmckpt unprotect GUEST, then vmckpt protect GUEST --to HOST",
        )
    return found


def _test(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = answer.get("test")
    return found if isinstance(found, dict) else None


def _progress(told: Mapping[str, Any]) -> str:
    if not told.get("name"):
        return "making a copy"
    return f"copying {told['name']}" if told.get("pages_copied") else f"starting {told['name']}"


def _tested(known: Known, told: Mapping[str, Any], took: Seconds) -> TestedFailover:
    guest, name, uri = known.operation.guest, str(told["name"]), known.backup.uri
    since, taken = told.get("since"), told.get("taken")
    age = None if since is None or taken is None else Seconds(max(0.0, since - taken))
    return TestedFailover(
        guest=guest, name=name, uuid=str(told["uuid"]), host=known.backup.name,
        epoch=told.get("epoch"), age=age, took=took,
        look=(f"virsh -c {uri} console {name}", f"virsh -c {uri} domdisplay {name}"),
        end=(f"vmckpt failover {guest} --end-test", f"virsh -c {uri} destroy {name}"),
    )  # fmt: skip
