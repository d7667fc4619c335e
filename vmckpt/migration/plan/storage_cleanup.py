"""Clean up after a guest has arrived with copied disks: allocate new images, remove old images.

Old images are removed only by a controller that ran the entire move. After a crash, the journal
does not show whether the guest has used an old image since.
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
    """The result of the cleanup."""

    removed: tuple[str, ...] = ()
    """Images that were removed from the source."""
    stays: tuple[str, ...] = ()
    """Images that should have been removed but were not, with the reasons, one per line."""
    troubles: tuple[str, ...] = ()


def meant(copies: CopyPlan) -> dict[str, Any]:
    """Return the intent of the cleanup, to be recorded in the step that creates the images."""
    return {"room": copies.room, "old": list(copies.left_behind) if copies.removes else []}


async def after_crash(
    intent: Mapping[str, Any], source: str, remotes: Remotes | None
) -> tuple[str, ...]:
    """Allocate the new images after the controller died; no old image is removed.

    `intent`: from the step that created the images. `source`: name of the host. Returns warnings,
    one per line.
    """
    room = dict(intent.get("room", {}))
    if remotes is None:
        lines = [f"{path} on the target might not be fully allocated" for path in room]
    else:
        lines = [*await give_room(remotes[1], room)]
    why = "the controller died before removing it; remove the image when it is no longer needed"
    return (*lines, *(f"{path} may still be on {source}: {why}" for path in intent.get("old", ())))


async def give_room(target: Remote, room: Mapping[str, Bytes]) -> tuple[str, ...]:
    """Allocate images on the target. Returns the errors, one text for each image.

    `room`: size of each image, by path; see CopyPlan.room.
    """
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
    """Identify the images that are to be removed, before the move. Returns their marks, by path.

    A mark that starts with `images.UNFIT` is the reason why an image cannot be removed. The result
    is empty if the policy keeps old images.

    `nvram`: the file with the firmware variables of a guest that moves while it `runs`. The
    variables themselves move with the guest's memory. If each host has its own file, the source's
    file would prevent a move back, so this file is also removed.
    """
    if not copies.removes:
        return {}
    try:
        found = await images.marks(remotes[0], copies.left_behind, held=runs)
        if nvram is not None and (await probe.same_files(*remotes, [nvram])).get(nvram) is False:
            # QEMU's firmware flash does not lock out other writers: no lock shows its use.
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
    """Allocate the new images and delete the old ones that `marks` recorded before the move.

    The guest must be confirmed to run on the target. `old`: the marks; `here`: the source; `check`
    raises if another controller has taken over. Returns which images were removed and which were
    not; errors are lines in the result.
    """
    troubles = await give_room(remotes[1], copies.room)
    if not old:
        return Tidied(troubles=troubles)
    removed, stays, unclear = list[str](), dict[str, str](), dict[str, str]()
    try:
        kept_paths = [path for path in old if path not in copies.left_behind]
        await images.flush(remotes[1], [*(one.path for one in copies.copies), *kept_paths])
        # Locks alone do not show all users: a shut-off guest holds no locks.
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
                stays |= left
            else:
                removed.append(path)
    except VmckptError as exc:
        unclear = {path: exc.message for path in old if path not in (*removed, *stays)}
    lines = [f"{path} is still on {here.host.name}: {why}" for path, why in stays.items()]
    lines += [f"{path} may still be on {here.host.name}: {why}" for path, why in unclear.items()]
    return Tidied(removed=tuple(removed), stays=tuple(lines), troubles=troubles)


def _why_it_stays(mark: str, users: Mapping[str, str]) -> str | None:
    if mark.startswith(images.UNFIT):
        return mark.removeprefix(images.UNFIT)
    user = users.get(mark.split(maxsplit=1)[0])
    return None if user is None else f"guest {user} uses it"
