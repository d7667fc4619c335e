"""Bringing a group back as the one cut that it is.

None of its guests is ended before all can be, none comes back while another one still runs as it
was, and none runs before all are back: so what one of them has received was sent by the others.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.errors import Cancelled, RemoteError, VmckptError
from vmckpt.model.callers import Caller
from vmckpt.model.hosts import Host
from vmckpt.snapshot import restoring
from vmckpt.snapshot.gate import Gate
from vmckpt.snapshot.requests import Restored, RestoreRequest
from vmckpt.snapshot.restoring import Opened
from vmckpt.snapshot.together import listening


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRestored:
    """A group that is back."""

    id: str
    members: tuple[Restored, ...]

    def as_json(self) -> dict[str, Any]:
        return {"group": self.id, "members": [one.as_json() for one in self.members]}


async def restore(
    id_: str, members: Sequence[tuple[Host, Opened]], request: RestoreRequest, caller: Caller,
    *, hosts: Mapping[str, Host],
) -> GroupRestored:  # fmt: skip
    """Bring the snapshots of a group back, each on its host, as `restoring.restore` does.

    Raises as that. If it fails before all are ready, no guest was touched; after that the error
    says how it stands with each, and none of them runs.
    """
    gate, stop = Gate(len(members)), asyncio.Event()
    caller_of = listening(replace(caller, stop=stop))

    async def one(host: Host, opened: Opened) -> Restored:
        mine = replace(request, snapshot=opened.public.id)
        told = caller_of(opened.public.id)
        try:
            return await restoring.restore(host, opened, mine, told, hosts=hosts, gate=gate)
        except BaseException:
            gate.fail()
            stop.set()
            raise

    passing = asyncio.create_task(_pass_on(caller.stop, stop, gate))
    try:
        ended = await asyncio.gather(*(one(*each) for each in members), return_exceptions=True)
    finally:
        passing.cancel()
    unexpected = [
        one for one in ended if isinstance(one, BaseException) and not isinstance(one, VmckptError)
    ]
    if unexpected:
        raise unexpected[0]
    failures = [one for one in ended if isinstance(one, VmckptError)]
    if failures:
        raise _summed_up(failures)
    return GroupRestored(id=id_, members=tuple(one for one in ended if isinstance(one, Restored)))


async def _pass_on(asked: asyncio.Event, stop: asyncio.Event, gate: Gate) -> None:
    await asked.wait()
    stop.set()
    gate.fail()


def _summed_up(failures: Sequence[VmckptError]) -> VmckptError:
    """The error that explains the others, with all that they tell. Pure."""
    error = min(failures, key=_rank)
    others = [one.message for one in failures if one is not error]
    error.message = "; ".join([error.message, *others])
    return error


def _rank(error: VmckptError) -> int:
    """What nobody knows comes first, then what went wrong, then who only waited in vain."""
    if isinstance(error, RemoteError) or not error.undone:
        return 0
    return 2 if isinstance(error, Cancelled) else 1
