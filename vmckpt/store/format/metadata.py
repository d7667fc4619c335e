"""The metadata of a snapshot: the public part, and the private part that may be encrypted.

The fields define the format: their names are the keys of the manifest's JSON. Adding or removing a
field, or changing a field's meaning, requires a new manifest version.

Pure.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from vmckpt.store.format.chunk_map import Kind

_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
Word = Annotated[str, Field(max_length=255, pattern=_PRINTABLE)]
"""Text that can safely be printed to a terminal, because it has no control characters."""
FilePath = Annotated[str, Field(max_length=4096, pattern=_PRINTABLE)]
Document = Annotated[str, Field(max_length=4 << 20)]
SnapshotId = Annotated[str, Field(pattern=r"^s-[a-z2-7]{16}$")]
Uuid = Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Hex16 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Labels = Annotated[Mapping[Word, Word], Field(max_length=64)]
T = TypeVar("T")

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


class Contents(StrEnum):
    """Which parts of a guest a snapshot contains."""

    MEMORY = "memory+disks"
    DISKS = "disks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Public:
    """The part of the metadata that can be read without a key."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    id: SnapshotId
    name: Word
    guest: Word
    guest_uuid: Uuid
    contents: Contents
    made_at: Annotated[float, Field(ge=0, lt=1 << 40)]
    """When the guest was captured, in seconds since 1970."""
    by: Word
    """The user and host that requested the snapshot, such as "root@controller"."""
    host: Word
    """The guest's host when the snapshot was created."""
    parent: SnapshotId | None
    """The guest's previous snapshot, if any, which is not needed to read this snapshot."""
    group: Annotated[str, Field(pattern=r"^g-[a-z2-7]{16}$")] | None
    """ID of a group (snapshots of several guests, taken at the same time); None: not in a group."""
    memory: Count
    disks: Count
    """Total size of the disks as the guest sees them, in bytes."""
    new: Count
    """Bytes that the snapshot added to the store."""
    qemu: Word
    """QEMU's version, such as "7.2.22"."""
    machine: Word
    accelerator: Word
    arch: Word
    epoch: Count
    """The number of earlier snapshots in the guest's chain."""
    owner: Word
    """Name and token of the lease under which the snapshot was created; empty: no lease."""
    tags: Labels
    """The operator's tags, and `SCHEDULE`."""
    domain: Word = ""
    """ID of the snapshot's domain; the snapshots of a domain share chunks. `manifest.encode` sets
    this and all following fields."""
    signer: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """The writer's public key."""
    private_hash: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """BLAKE3 of the private part as stored."""
    data_key_id: Hex16 | None = None
    """ID of the data key for the private part; None: the private part is not encrypted."""

    @property
    def schedule(self) -> str | None:
        """The schedule that created the snapshot; None if it was created by hand."""
        return self.tags.get(SCHEDULE)


SCHEDULE = "schedule"
"""The tag with the name of the schedule that created a snapshot and may delete the snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RamBlock:
    """A RAM block of QEMU."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Word
    size: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMake:
    """How to recreate a disk's image as an image without a backing file."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    target: Word
    """The disk's target in the domain XML, such as "vda"; also the name of the disk's region."""
    format: Word
    size: Count
    options: Word
    """Options for `qemu-img create -o`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the migration stream, stored as consecutive chunks."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Word
    """"head" (the stream's header: everything before the memory) or "tail" (device state)."""
    size: Count
    """Total size of all chunks in bytes."""
    chunks: Annotated[tuple[Count, ...], Field(max_length=1 << 16)]
    """Indexes into the chunk table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateFacts:
    """The metadata in the private part. Maps, digests and files are stored separately."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    domain_xml: Document
    cpu_xml: Document | None
    """The CPU definition with all features; None: QEMU's default CPU."""
    boot_files: Annotated[tuple[FilePath, ...], Field(max_length=64)]
    """Paths of the kernel, initrd and firmware, which QEMU reads from the host's file system."""
    ram: Annotated[tuple[RamBlock, ...], Field(max_length=1024)]
    disks: Annotated[tuple[DiskMake, ...], Field(max_length=1024)]
    stream: Annotated[tuple[Part, ...], Field(max_length=16)] = ()
    """QEMU's state without the memory; empty for a snapshot without memory."""
    agent: Labels = field(default_factory=dict)
    """Data reported by the guest agent; empty if none answered, or if there is no memory."""
    warnings: Annotated[tuple[Word, ...], Field(max_length=64)] = ()
    """Warnings that were issued while the snapshot was created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRow:
    """A region in the private part's JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Word
    kind: Kind
    size: Count
    unit: Count
    map: Count
    """Size of the region's encoded map in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A small file in the private part's JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Word
    """Name of the file: "nvram" or "tpm/…"."""
    size: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The private part's JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    salt: Hex32 | None
    """The domain's salt; None: nothing is encrypted."""
    chunks: Count
    regions: Annotated[tuple[RegionRow, ...], Field(max_length=1024)]
    files: Annotated[tuple[FileRow, ...], Field(max_length=1024)]
    facts: PrivateFacts


PUBLIC: TypeAdapter[Public] = TypeAdapter(Public)
INSIDE: TypeAdapter[Inside] = TypeAdapter(Inside)


def dumped(form: TypeAdapter[T], value: T) -> bytes:
    """Return a value as JSON. Raises ValueError, with a one-line message, for an invalid value."""
    try:
        text = form.dump_json(value)
    except PydanticSerializationError as exc:
        raise ValueError(str(exc).splitlines()[0][:120]) from exc
    loaded(form, text)
    return text


def loaded(form: TypeAdapter[T], text: bytes) -> T:
    """Parse a value from JSON. Raises ValueError with a one-line message."""
    try:
        return form.validate_json(text, strict=True)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step)[:40] for step in first["loc"])
        line = f"{where}: {first['msg'][:80]}" if where else first["msg"][:80]
        raise ValueError(" ".join(line.split())) from exc


def new_id(entropy: bytes, letter: str = "s") -> str:
    """Build an ID from 10 random bytes.

    `letter`: the ID's first letter: "g" for the ID of a group, else of a snapshot.
    """
    return f"{letter}-{base64.b32encode(entropy[:10]).decode().lower()}"
