"""Copying disks that the hosts do not share: which disks, to where, and what prevents a copy.

`wanted`, `path_on_target` and `plan` decide and are pure; `wish_of` and `plan_copies` fetch their
input; `prepare`, `remove` and `unmade` act.

libvirt copies disks over NBD into existing images, before it sends memory. libvirt creates no
images outside its pools, and would overwrite any file with the image's name. QEMU 7.2 preserves
holes, so a thin image stays thin without further settings. A preallocated qcow2 image stays
allocated; a raw image does not, so raw images are allocated after the move.
"""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from shlex import quote
from types import MappingProxyType

from vmckpt.errors import RemoteError
from vmckpt.hypervisor import storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal.records import StoredStep
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.model.disk import (
    NVRAM,
    CopyOptions,
    CopyPlan,
    DiskCopy,
    Drive,
    Image,
    Made,
    Place,
    Room,
)
from vmckpt.model.finding import Finding, Severity, blocker
from vmckpt.policy.model import CopyKind, LeftBehind, Storage
from vmckpt.remote import images as remote_images
from vmckpt.remote.ssh import Remote
from vmckpt.units import MIB, Bytes, show_bytes, show_count

FORMATS = ("raw", "qcow2")
_NO_CHAINS: Mapping[str, Sequence[str]] = MappingProxyType({})
# A guest keeps writing while a thin image is copied.
_GROWTH = 1.1


def wanted(
    drives: Sequence[Drive], same_file: Mapping[str, bool], wish: CopyOptions
) -> tuple[Drive, ...]:
    """Return the drives to copy: those named in `wish`, else all drives known not to be shared.

    Firmware variables that are not shared are always copied. Read-only drives and drives without a
    path are never copied.
    """
    written = [drive for drive in drives if drive.path is not None and not drive.read_only]
    apart = tuple(drive for drive in written if same_file.get(drive.path or "") is False)
    if not wish.disks:
        return apart
    named = tuple(drive for drive in written if drive.name in wish.disks)
    return (*named, *(drive for drive in apart if drive.device == NVRAM))


def path_on_target(drive: Drive, wish: CopyOptions) -> str:
    """Return the path of a drive's copy. Firmware variables keep their path."""
    path = PurePosixPath(drive.path or "")
    if wish.folder is None or drive.device == NVRAM:
        return str(path)
    return str(PurePosixPath(wish.folder) / path.name)


async def wish_of(overrides: Storage, target: Hypervisor) -> CopyOptions:
    """Return the copy options of a policy.

    Raises BadInput if the policy's storage pool cannot be used on the target; HypervisorError if
    libvirt fails.
    """
    return CopyOptions(
        full=overrides.copy is CopyKind.FULL, disks=overrides.disks,
        folder=await storage.folder_of(target, overrides.pool) if overrides.pool else None,
        remove=overrides.left_behind is LeftBehind.REMOVE,
    )  # fmt: skip


def plan(
    *,
    source: str,
    target: str,
    drives: Sequence[Drive],
    same_file: Mapping[str, bool],
    wish: CopyOptions,
    images: Mapping[str, Image | str],
    places: Mapping[str, Place],
    chains: Mapping[str, Sequence[str]] = _NO_CHAINS,
) -> CopyPlan:
    """Return the copies to make, and all findings about them.

    `source`, `target`: host names. `images`: each image by its path on the source, or the reason
    why the image could not be read. `places`: the locations of the new images, by path on the
    target. `chains`: backing files of each disk, by name, from the top down; a disk that has a
    backing file, but no chain here, is not copied.
    """
    chosen = wanted(drives, same_file, wish)
    findings = [*_overrides(source, drives, same_file, wish)]
    copies = []
    for drive in chosen:
        image = images.get(drive.path or "")
        base = _base(image, chains.get(drive.name, ()), same_file, wish)
        found = [*_drive(source, drive, image, base)]
        if not found and isinstance(image, Image):
            copies.append(_copy(drive, image, wish, base))
            findings += _image(source, drive, image, wish, base)
        findings += found
    findings += _twins(target, copies)
    for copy in copies:
        findings += _place(target, copy, places.get(copy.path))
    rooms = tuple(_rooms(copies, places))
    findings += _room(target, rooms)
    return CopyPlan(
        copies=tuple(copies),
        rooms=rooms,
        findings=tuple(findings),
        rest_shared=all(_shared(drive, same_file) for drive in drives if drive not in chosen),
        removes=wish.remove,
    )


def _base(
    image: Image | str | None, chain: Sequence[str], same_file: Mapping[str, bool],
    wish: CopyOptions,
) -> tuple[str, str] | None:  # fmt: skip
    """Return path and format of the backing file that the copy uses on the target.

    None if a full copy is made, or if the target is not known to have the same complete chain.
    """
    if not isinstance(image, Image) or image.backing_format not in FORMATS or wish.full:
        return None
    same = bool(chain) and all(same_file.get(path) is True for path in chain)
    return (chain[0], image.backing_format) if same else None


def _shared(drive: Drive, same_file: Mapping[str, bool]) -> bool:
    """Return whether libvirt can use a drive on the target without a copy."""
    empty = drive.path is None and drive.kind in ("file", "block")
    same = drive.path is not None and same_file.get(drive.path) is True
    return drive.read_only or empty or same or drive.kind == "network"


def _named(drive: Drive) -> str:
    return f"disk {drive.name} ({drive.path})"


def _overrides(
    source: str, drives: Sequence[Drive], same_file: Mapping[str, bool], wish: CopyOptions
) -> Iterator[Finding]:
    known = {drive.name: drive for drive in drives}
    for name in wish.disks:
        drive = known.get(name)
        if drive is None:
            yield blocker(
                "disk-unknown", source, f"the guest has no disk {name!r}",
                f"choose from the guest's disks: {', '.join(known) or 'none'}",
            )  # fmt: skip
        elif drive.path is None or drive.read_only:
            yield blocker(
                "disk-not-copied", source,
                f"disk {name} is {'read-only' if drive.read_only else 'not a file'} and cannot be"
                " copied",
                f"remove {name} from storage.disks in the policy",
            )  # fmt: skip
        elif same_file.get(drive.path) is True:
            yield blocker(
                "disk-shared", source,
                f"{_named(drive)} is the same file on both hosts: it would be copied onto itself",
                f"remove {name} from storage.disks in the policy",
            )  # fmt: skip


def _drive(
    source: str, drive: Drive, image: Image | str | None, base: tuple[str, str] | None
) -> Iterator[Finding]:
    """Yield the reason why a drive cannot be copied, if there is one."""
    what = _named(drive)
    if drive.kind != "file":
        yield blocker(
            "disk-not-copied", source, f"{what} has type {drive.kind}; only files can be copied",
            "share the disk between the hosts",
        )  # fmt: skip
    elif drive.shareable:
        yield blocker(
            "disk-shared", source,
            f"{what} is shared with other guests; they would not share the copy",
            "share its directory between the hosts",
        )  # fmt: skip
    elif drive.format not in FORMATS:
        yield blocker(
            "disk-not-copied", source,
            f"{what} has format {drive.format}; only raw and qcow2 can be copied",
            "convert the image, or share its directory between the hosts",
        )  # fmt: skip
    elif drive.encrypted:
        yield blocker(
            "disk-encrypted", source,
            f"{what} is encrypted by QEMU; the copy would not be encrypted",
            "share its directory between the hosts",
        )  # fmt: skip
    elif not isinstance(image, Image):
        yield blocker(
            "disk-unread", source, image or f"{what} could not be examined",
            f"run vmckpt doctor {source}",
        )  # fmt: skip
    elif image.backing is not None and base is None:
        yield blocker(
            "disk-backing", source,
            f"{what} has backing file {image.backing}, which is not copied; only a thin copy can"
            " use it on the target, if both hosts are known to have the same file",
            # A commit would write to the backing file, which may be that of other guests.
            "make it a complete image, which does not need the backing file:"
            f" virsh blockpull GUEST {drive.name} --wait",
        )  # fmt: skip
    elif image.data_file is not None:
        yield blocker(
            "disk-data-file", source, f"{what} has an external data file, {image.data_file}",
            "convert the image to one without an external data file",
        )  # fmt: skip
    elif image.damaged:
        yield blocker(
            "disk-damaged", source, f"{what} is marked corrupt",
            # Only a repair marks the image as consistent again.
            "shut down the guest, then run qemu-img check -f qcow2 -r all"
            f" {quote(drive.path or '')} on {source}",
        )  # fmt: skip


def _image(
    source: str, drive: Drive, image: Image, wish: CopyOptions, base: tuple[str, str] | None
) -> Iterator[Finding]:
    """Yield the findings about a drive that is copied."""
    after = (
        "is removed after the guest has arrived" if wish.remove else "is kept but no longer used"
    )
    above = "" if base is None else f" without its backing file {base[0]}, which both hosts have"
    yield Finding(
        code="disk-copied", severity=Severity.INFO, where=source,
        text=f"{_named(drive)} is copied{above}; the source's image {after}",
        hint=None if wish.remove else f"remove {drive.path} when it is no longer needed",
    )  # fmt: skip
    internal = show_count(image.snapshots, "internal snapshot")
    if image.snapshots and wish.remove:
        yield blocker(
            "disk-snapshots", source,
            f"{_named(drive)} has {internal}, which would be removed with the source's image",
            "delete the snapshots, or set left_behind: keep in the policy",
        )  # fmt: skip
    elif image.snapshots:
        yield Finding(
            code="disk-snapshots", severity=Severity.WARNING, where=source,
            text=f"{_named(drive)} is copied without its {internal}",
            hint="keep the source's image if the snapshots are needed",
        )  # fmt: skip


def _copy(drive: Drive, image: Image, wish: CopyOptions, base: tuple[str, str] | None) -> DiskCopy:
    # qcow2's metadata: eight bytes per cluster, and about the same again for refcounts.
    tables = image.size // 2048 + MIB if drive.format == "qcow2" else 0
    needed = image.size + tables if wish.full else min(image.size, image.allocated) * _GROWTH
    return DiskCopy(
        name=drive.name,
        source=drive.path or "",
        path=path_on_target(drive, wish),
        format=drive.format,
        size=image.size,
        needed=Bytes(round(needed)),
        allocated=Bytes(min(image.size, image.allocated)),
        full=wish.full,
        options=image.options,
        mode=image.mode,
        base=base,
    )


def _twins(target: str, copies: Sequence[DiskCopy]) -> Iterator[Finding]:
    paths = [copy.path for copy in copies]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        names = " and ".join(copy.name for copy in copies if copy.path == path)
        yield blocker(
            "disk-twins", target, f"disks {names} would both be copied to {path}",
            "use the same directories as on the source",
        )  # fmt: skip


def _place(target: str, copy: DiskCopy, place: Place | None) -> Iterator[Finding]:
    folder = str(PurePosixPath(copy.path).parent)
    if place is None:
        yield blocker(
            "disk-place-unknown", target, f"could not check {folder}",
            f"run vmckpt doctor {target}",
        )  # fmt: skip
    elif place.exists:
        yield blocker(
            "disk-in-the-way", target, f"{copy.path} already exists and is not overwritten",
            "move the file away if it is not needed, or choose another directory",
        )  # fmt: skip
    elif not place.writable:
        yield blocker(
            "disk-no-folder", target, f"{folder} does not exist, or is not writable",
            f"run mkdir -p {quote(folder)} there",
        )  # fmt: skip


def _rooms(copies: Sequence[DiskCopy], places: Mapping[str, Place]) -> Iterator[Room]:
    """Yield, for each file system, the total space that its images need."""
    by_device: dict[str, list[DiskCopy]] = {}
    for copy in copies:
        # A directory that does not exist yet has no free space that is known.
        if copy.path in places and places[copy.path].writable:
            by_device.setdefault(places[copy.path].device, []).append(copy)
    for device, group in by_device.items():
        yield Room(
            device=device, folder=str(PurePosixPath(group[0].path).parent),
            free=places[group[0].path].free,
            needed=Bytes(sum(copy.needed for copy in group)),
            grown=Bytes(sum(copy.size for copy in group)),
        )  # fmt: skip


def _room(target: str, rooms: Sequence[Room]) -> Iterator[Finding]:
    for room in rooms:
        if room.needed > room.free:
            yield blocker(
                "disk-room", target,
                f"{show_bytes(room.needed)} needed in {room.folder}, {show_bytes(room.free)} free",
                "free some space there, or choose another directory",
            )  # fmt: skip
        elif room.grown > room.free:
            yield Finding(
                code="disk-overcommitted", severity=Severity.WARNING, where=target,
                text=f"the copies in {room.folder} can grow to {show_bytes(room.grown)}, with"
                f" {show_bytes(room.free)} free",
                hint="monitor the free space there",
            )  # fmt: skip


async def plan_copies(
    source: Remote,
    target: Remote,
    drives: Sequence[Drive],
    same_file: Mapping[str, bool],
    wish: CopyOptions,
    *,
    chains: Mapping[str, Sequence[str]] = _NO_CHAINS,
) -> CopyPlan:
    """Query both hosts and plan the copies. See `plan` for `chains`.

    Raises RemoteError if a host cannot be queried.
    """
    chosen = [drive for drive in wanted(drives, same_file, wish) if drive.kind == "file"]
    found = await asyncio.gather(*(_described(source, drive) for drive in chosen))
    paths = sorted({path_on_target(drive, wish) for drive in chosen})
    return plan(
        source=source.host.name,
        target=target.host.name,
        drives=drives,
        same_file=same_file,
        wish=wish,
        images={drive.path or "": image for drive, image in zip(chosen, found, strict=True)},
        places=await remote_images.places(target, paths) if paths else {},
        chains=chains,
    )


async def _described(source: Remote, drive: Drive) -> Image | str:
    if drive.format not in FORMATS:
        return f"{drive.path}: format {drive.format}"
    try:
        return await remote_images.describe(source, drive.path or "", drive.format)
    except RemoteError as exc:
        return exc.message


def new_suffix() -> str:
    """Return a random suffix for the temporary names of one move's images."""
    return f"vmckpt-{secrets.token_hex(4)}"


async def prepare(target: Remote, copies: CopyPlan, suffix: str) -> Made:
    """Create the images on the target; `images.publish` gives them their final paths.

    If an image cannot be created, all images are removed again. Raises RemoteError.
    """
    made = Made(host=target.host.name, suffix=suffix)
    for copy in copies.copies:
        making = asyncio.create_task(remote_images.create(target, copy, made.temporary(copy.path)))
        try:
            made.marks[copy.path] = await asyncio.shield(making)
        except BaseException:
            # The target creates the image anyway, so wait before removing the image.
            await asyncio.wait([making])
            made.marks[copy.path] = ""
            await asyncio.shield(remote_images.remove(target, made))
            raise
    return made


async def remove(target: Remote, made: Made) -> tuple[str, ...]:
    """Remove the images that `prepare` created. The guest must be known to stay on the source.

    Returns the images that could not be removed, each with the reason. Raises RemoteError.
    """
    left = await remote_images.remove(target, made)
    return tuple(f"{path} ({why})" for path, why in left.items())


async def unmade(remotes: Remotes | None, step: StoredStep | None) -> list[str]:
    """Remove images that were created for a move that did not happen.

    `step`: the step in the journal that created the images; None if there is none. Returns the
    images that could not be removed, each with the reason. A host that does not answer is not an
    error, because it must not prevent recovery of the other steps.
    """
    if step is None:
        return []
    host, paths = str(step.intent.get("host")), list(step.intent.get("paths", []))
    marks = {**dict.fromkeys(paths, ""), **(step.result or {}).get("marks", {})}
    try:
        if remotes is None:
            raise RemoteError(f"{host} has no ssh login")
        made = Made(host=host, suffix=str(step.intent["suffix"]), marks=marks)
        return list(await remove(remotes[1], made))
    except RemoteError as exc:
        return [
            f"{path} on {host} may have been created for this migration, and may still exist: {exc}"
            for path in paths
        ]
