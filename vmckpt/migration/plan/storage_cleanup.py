"""Once a guest has arrived with copied disks: new images get their room, old ones may go.

Only who saw the whole move removes what it left: from what a controller that died has written down
nobody can tell whether a guest has gone on from the old image since.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vmckpt.errors import RemoteError, VmckptError
from vmckpt.hypervisor import storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migration.plan import storage_copy
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.model.disk import CopyPlan, Made
from vmckpt.remote import images, probe
from vmckpt.remote.images import Has
from vmckpt.remote.ssh import Remote
from vmckpt.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tidied:
    """What was done."""

    removed: tuple[str, ...] = ()
    """Images of the source."""
    stays: tuple[str, ...] = ()
    """Which of them should have gone and did not, with the reason, line by line."""
    troubles: tuple[str, ...] = ()


def meant(copies: CopyPlan) -> dict[str, Any]:
    """What is to be done, for the step that makes the images."""
    return {"room": copies.room, "old": list(copies.left_behind) if copies.removes else []}


async def after_crash(
    intent: Mapping[str, Any], source: str, remotes: Remotes | None
) -> tuple[str, ...]:
    """What can still be done of what the step meant; what is to be told, line by line."""
    room = dict(intent.get("room", {}))
    if remotes is None:
        lines = [f"{path} may not have all its room" for path in room]
    else:
        lines = [*await give_room(remotes[1], room)]
    why = "its controller ended before it was removed; remove it once all is well"
    return (*lines, *(f"{path} may still be on {source}: {why}" for path in intent.get("old", ())))


async def give_room(target: Remote, room: Mapping[str, Bytes]) -> tuple[str, ...]:
    """Images get their room (see CopyPlan.room). What went wrong, line by line."""
    troubles = []
    for path, size in room.items():
        try:
            await images.take_room(target, path, size)
        except RemoteError as exc:
            troubles.append(str(exc))
    return tuple(troubles)


async def marks(
    remotes: Remotes, copies: CopyPlan, *, runs: bool, nvram: str | None = None
) -> dict[str, str]:
    """Images that are to go, as they are known again; before the move.

    `nvram`: of a guest that moves while it `runs`, with the contents of it in its memory: each
    host's file is its own, and that of the source would bar its way back, too.
    """
    if not copies.removes:
        return {}
    try:
        found = await images.marks(remotes[0], copies.left_behind, held=runs)
        if nvram is not None and (await probe.same_files(*remotes, [nvram])).get(nvram) is False:
            # Firmware in flash memory lets others write: no lock tells that it is held.
            found |= await images.marks(remotes[0], [nvram])
    except RemoteError as exc:
        return dict.fromkeys(copies.left_behind, f"{images.UNFIT}{exc.message}")
    return found


async def finish(
    copies: CopyPlan,
    old: Mapping[str, str],
    here: Hypervisor,
    remotes: Remotes,
    check: Callable[[], None],
) -> Tidied:
    """Room for the new images, and away with the old ones, which `marks` knew before the move.

    The guest was seen to arrive; `here` is the source. `check` raises if the move is another
    controller's by now.
    """
    troubles = await give_room(remotes[1], copies.room)
    if not old:
        return Tidied(troubles=troubles)
    removed, stays = list[str](), dict[str, str]()
    try:
        kept_paths = [path for path in old if path not in copies.left_behind]
        await images.flush(remotes[1], [*(one.path for one in copies.copies), *kept_paths])
        # Guests that are off are held by no lock; those that run are not found by theirs alone.
        all_ = await storage.of_all(here)
        has = [Has(user.guest, path, user.format) for path, user in all_.items()]
        users = await images.image_users(remotes[0], has)
        for path, mark in old.items():
            check()
            if reason := _why_it_stays(mark, users):
                stays[path] = reason
                continue
            made = Made(host=here.host.name, suffix=storage_copy.new_suffix(), marks={path: mark})
            if left := await images.remove(remotes[0], made):
                stays[path] = left[0].removeprefix(f"{path} (").removesuffix(")")
            else:
                removed.append(path)
    except VmckptError as exc:
        stays |= {path: exc.message for path in old if path not in (*removed, *stays)}
    lines = (f"{path} is still on {here.host.name}: {why}" for path, why in stays.items())
    return Tidied(removed=tuple(removed), stays=tuple(lines), troubles=troubles)


def _why_it_stays(mark: str, users: Mapping[str, str]) -> str | None:
    if mark.startswith(images.UNFIT):
        return mark.removeprefix(images.UNFIT)
    user = users.get(mark.split(maxsplit=1)[0])
    return None if user is None else f"guest {user} has it"
