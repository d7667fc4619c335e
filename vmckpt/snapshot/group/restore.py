"""Bringing a group back as the one cut that it is.

None of its guests is ended before all can be, none comes back while another one still runs as it
was, and none runs before all are back: so what one of them has received was sent by the others.
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
    """A group that is back."""

    id: str
    members: tuple[Restored, ...]

    def as_json(self) -> dict[str, Any]:
        return {"group": self.id, "members": [one.as_json() for one in self.members]}


async def restore(
    id_: str, members: Sequence[Member], request: RestoreRequest, caller: Caller,
    *, hosts: Mapping[str, Host],
) -> GroupRestored:  # fmt: skip
    """Bring the snapshots of a group back, each on its host, as `restore.restore` does.

    Raises as that. If it fails before all are ready, no guest was touched; after that the error
    says how it stands with each, and none of them runs.
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
        # All who were stopped may have waited then.
        raise Cancelled(error.message) if isinstance(error, TimedOut) else error
    return GroupRestored(id=id_, members=tuple(one for one in ended if isinstance(one, Restored)))


async def _pass_on(asked: asyncio.Event, stop: asyncio.Event, gate: Gate) -> None:
    await asked.wait()
    stop.set()
    gate.fail()


def apart(members: Sequence[Member], request: RestoreRequest) -> None:
    """See that no two of them would have one image. Raises BadInput. Pure."""
    whose: dict[tuple[str, str], str] = {}
    for host, opened in members:
        guest = opened.public.guest
        for path in restore_restore.planned(opened, request).images.values():
            other = whose.setdefault((host.name, path), guest)
            if other != guest:
                raise BadInput(
                    f"{path} on {host.name} would be an image of {other} and of {guest}",
                    hint="restore them on different hosts, one by one",
                )


def summed_up(failures: Sequence[tuple[str, BaseException]]) -> BaseException:
    """The error that explains the others, given what all of them tell, by guest."""
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
    """Unexpected errors and unknown outcomes first, then failures, then guests that were stopped,
    last those that only waited."""
    if not isinstance(error, VmckptError):
        return 0
    if isinstance(error, RemoteError) or not error.undone:
        return 1
    return {Cancelled: 3, TimedOut: 4}.get(type(error), 2)
