"""Once a guest has arrived with copied disks: new images get their room, old ones may go."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vmckpt.errors import RemoteError, VmckptError
from vmckpt.hypervisor import guests
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migrate import disks
from vmckpt.migrate.gather import Remotes
from vmckpt.model.guests import Guest
from vmckpt.model.images import CopyPlan, Made
from vmckpt.remote import images
from vmckpt.remote.ssh import Remote


@dataclass(frozen=True, slots=True, kw_only=True)
class Tidied:
    """What was done."""

    removed: tuple[str, ...] = ()
    """Images of the source."""
    troubles: tuple[str, ...] = ()


async def meant(source: Remote, copies: CopyPlan) -> dict[str, Any]:
    """What is to be done, for the step that makes the images. Raises RemoteError.

    Old images are written down with their marks: whoever finishes the move, perhaps days later,
    removes no other file that came to have the name.
    """
    old = await images.marks(source, copies.left_behind) if copies.removes else {}
    return {"room": copies.room, "old": old}


async def finish(intent: Mapping[str, Any], here: Hypervisor, remotes: Remotes | None) -> Tidied:
    """Do what `meant` said in the step's intent; `here` is the source. The guest has arrived."""
    room, old = dict(intent.get("room", {})), dict(intent.get("old", {}))
    if remotes is None:
        lines = [f"{path} may not have all its room" for path in room]
        return Tidied(troubles=(*lines, *(f"{path} was not removed" for path in old)))
    troubles = []
    for path, size in room.items():
        # The copy itself leaves holes where the source has some; see images.take_room.
        try:
            await images.take_room(remotes[1], path, size)
        except RemoteError as exc:
            troubles.append(str(exc))
    if not old:
        return Tidied(troubles=tuple(troubles))
    name = here.host.name
    try:
        found = await _remove(old, list(intent["paths"]), here, remotes)
    except VmckptError as exc:
        lines = [f"{path} is still on {name}: {exc.message}" for path in old]
        return Tidied(troubles=(*troubles, *lines))
    kept = (f"still on {name}: {line}" for line in found.troubles)
    return Tidied(removed=found.removed, troubles=(*troubles, *kept))


async def _remove(
    old: Mapping[str, str], new: list[str], here: Hypervisor, remotes: Remotes
) -> Tidied:
    """No guest there may have it, nor any QEMU; and what replaces it is on its disk."""
    used = {file: one.name for one in await guests.all_guests(here) for file in _files(one)}
    removed, kept = list[str](), list[str]()
    await images.flush(remotes[1], new)
    for path, mark in old.items():
        if path in used:
            kept.append(f"{path} (guest {used[path]} has it)")
        elif not mark:
            kept.append(f"{path} (it is no plain file)")
        else:
            made = Made(host=here.host.name, suffix=disks.new_suffix(), marks={path: mark})
            left = await images.remove(remotes[0], made)
            kept += left
            removed += [] if left else [path]
    return Tidied(removed=tuple(removed), troubles=tuple(kept))


def _files(guest: Guest) -> set[str | None]:
    disks = {file for disk in guest.disks for file in (disk.source, *disk.below)}
    return {*disks, guest.nvram, *guest.boot_files}
