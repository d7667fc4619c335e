"""Restore the guests of a group consistently.

No guest is stopped before all guests can be stopped. No guest is restored while another guest is
still running in its old state. No guest resumes before all guests are restored. So every message
that a restored guest has received was also sent in the restored state of its sender.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.errors import BadInput, Cancelled, RemoteError, TimedOut, VmckptError
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.snapshot.group.create import listening
from vmckpt.snapshot.request import Restored, RestoreRequest
from vmckpt.snapshot.restore import restore as restore_restore
from vmckpt.snapshot.restore.restore import Gate, Opened

Member = tuple[Host, Opened]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRestored:
    """A group that was restored."""

    id: str
    members: tuple[Restored, ...]

    def as_json(self) -> dict[str, Any]:
        return {"group": self.id, "members": [one.as_json() for one in self.members]}


async def restore(
    id_: str, members: Sequence[Member], request: RestoreRequest, caller: Caller,
    *, hosts: Mapping[str, Host],
) -> GroupRestored:  # fmt: skip
    """Restore the snapshots of a group, each on its host, as `restore.restore` does.

    Raises the errors of `restore.restore`. If a restore fails before all guests are ready, no guest
    was changed. If it fails later, no guest is running, and the error reports each guest's state.
    """
    apart(members, request)
    gate, stop = Gate(len(members)), asyncio.Event()
    caller_of = listening(replace(caller, stop=stop))

    async def one(host: Host, opened: Opened) -> Restored:
        mine = replace(request, snapshot=opened.public.id)
        told = caller_of(opened.public.id)
        try:
            return await restore_restore.restore(host, opened, mine, told, hosts=hosts, gate=gate)
        except BaseException:
            gate.fail()
            stop.set()
            raise

    passing = asyncio.create_task(_pass_on(caller.stop, stop, gate))
    try:
        ended = await asyncio.gather(*(one(*each) for each in members), return_exceptions=True)
    finally:
        passing.cancel()
    names = [opened.public.guest for _, opened in members]
    failures = [
        (name, one)
        for name, one in zip(names, ended, strict=True)
        if isinstance(one, BaseException)
    ]
    if failures:
        error = summed_up(failures)
        # If only timeouts were raised, all members were waiting when the operator cancelled.
        raise Cancelled(error.message) if isinstance(error, TimedOut) else error
    return GroupRestored(id=id_, members=tuple(one for one in ended if isinstance(one, Restored)))


async def _pass_on(asked: asyncio.Event, stop: asyncio.Event, gate: Gate) -> None:
    await asked.wait()
    stop.set()
    gate.fail()


def apart(members: Sequence[Member], request: RestoreRequest) -> None:
    """Check that no two guests would use the same image on a host. Raises BadInput. Pure."""
    whose: dict[tuple[str, str], str] = {}
    for host, opened in members:
        guest = opened.public.guest
        for path in restore_restore.planned(opened, request).images.values():
            other = whose.setdefault((host.name, path), guest)
            if other != guest:
                raise BadInput(
                    f"{path} on {host.name} would be an image of both {other} and {guest}",
                    hint="restore the guests one by one, on different hosts",
                )


def summed_up(failures: Sequence[tuple[str, BaseException]]) -> BaseException:
    """Return the most significant of the errors, with the messages of the others added.

    `failures` are guests and their errors.
    """
    error = min((one for _, one in failures), key=_rank)
    if isinstance(error, VmckptError):
        others = [
            f"{name}: {one.message}" if name not in one.message else one.message
            for name, one in failures
            if one is not error and isinstance(one, VmckptError)
        ]
        error.message = "; ".join([error.message, *others])
    return error


def _rank(error: BaseException) -> int:
    """Rank an error: unexpected errors first, then unknown outcomes, failures, cancelled guests,
    and last guests that only waited.
    """
    if not isinstance(error, VmckptError):
        return 0
    if isinstance(error, RemoteError) or not error.undone:
        return 1
    return {Cancelled: 3, TimedOut: 4}.get(type(error), 2)
