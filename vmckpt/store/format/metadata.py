"""What a snapshot tells of itself: the part that everybody may read, and the part behind the key.

The fields are the format: their names are the keys of the manifest's JSON. A field that is added,
dropped or read in another way makes a new version of the manifest.

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
"""Goes to a terminal as it is: no control characters."""
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
    """What of a guest is in a snapshot."""

    MEMORY = "memory+disks"
    DISKS = "disks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Public:
    """What everybody may read who can read the store."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    id: SnapshotId
    name: Word
    guest: Word
    guest_uuid: Uuid
    contents: Contents
    made_at: Annotated[float, Field(ge=0, lt=1 << 40)]
    """Seconds since 1970, when the guest stood still."""
    by: Word
    """Who asked for it, and where: "root@controller"."""
    host: Word
    """Where the guest ran."""
    parent: SnapshotId | None
    """The one before in the guest's life; it is not needed to read this one."""
    group: Annotated[str, Field(pattern=r"^g-[a-z2-7]{16}$")] | None
    """The consistent cut it is part of."""
    memory: Count
    disks: Count
    """Bytes the guest sees."""
    new: Count
    """Bytes that the store took for it."""
    qemu: Word
    """The emulator's version: "7.2.22"."""
    machine: Word
    accelerator: Word
    arch: Word
    epoch: Count
    """How many snapshots the guest's line had before."""
    owner: Word
    """Token of the lease under which it was made."""
    tags: Labels
    """`SCHEDULE` and what the operator likes."""
    domain: Word = ""
    """Who shares chunks with it. This and what follows is filled in when it is written."""
    signer: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """The writer's public key."""
    private_hash: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """BLAKE3 of the private part as it is stored."""
    data_key_id: Hex16 | None = None
    """Of which data key the private part needs; None: it is not encrypted."""

    @property
    def schedule(self) -> str | None:
        """The schedule that made it; None: a person did."""
        return self.tags.get(SCHEDULE)


SCHEDULE = "schedule"
"""The tag that names the schedule that made a snapshot, and may remove it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RamBlock:
    """A block of memory as QEMU has it."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Word
    size: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMake:
    """How to make a disk's image anew; it has no backing file then."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    target: Word
    """Its name in the guest, and its region's: "vda"."""
    format: Word
    size: Count
    options: Word
    """As `qemu-img create -o` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a stream: some chunks, one after the other."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Word
    """"head" (up to the memory) or "tail" (device state)."""
    size: Count
    """Bytes, all chunks together."""
    chunks: Annotated[tuple[Count, ...], Field(max_length=1 << 16)]
    """Indexes into the chunk table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateFacts:
    """What only who has the key may read, but for maps, digests and files."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    domain_xml: Document
    cpu_xml: Document | None
    """The CPU with all its features; None: QEMU's default."""
    boot_files: Annotated[tuple[FilePath, ...], Field(max_length=64)]
    """Kernel, initrd and firmware that QEMU reads from its host."""
    ram: Annotated[tuple[RamBlock, ...], Field(max_length=1024)]
    disks: Annotated[tuple[DiskMake, ...], Field(max_length=1024)]
    stream: Annotated[tuple[Part, ...], Field(max_length=16)] = ()
    """QEMU's state but for the memory; empty without memory."""
    agent: Labels = field(default_factory=dict)
    """What the guest agent said; empty: there is none."""
    warnings: Annotated[tuple[Word, ...], Field(max_length=64)] = ()
    """What was not as it should be when it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRow:
    """A region in the private part's JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Word
    kind: Kind
    size: Count
    unit: Count
    map: Count
    """Bytes of its map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A small file in the private part's JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Word
    """"nvram", "tpm/…"."""
    size: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The private part's JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    salt: Hex32 | None
    """The domain's; None: nothing is encrypted."""
    chunks: Count
    regions: Annotated[tuple[RegionRow, ...], Field(max_length=1024)]
    files: Annotated[tuple[FileRow, ...], Field(max_length=1024)]
    facts: PrivateFacts


PUBLIC: TypeAdapter[Public] = TypeAdapter(Public)
INSIDE: TypeAdapter[Inside] = TypeAdapter(Inside)


def dumped(form: TypeAdapter[T], value: T) -> bytes:
    """As JSON. Raises ValueError in one line if it could not be read back."""
    try:
        text = form.dump_json(value)
    except PydanticSerializationError as exc:
        raise ValueError(str(exc).splitlines()[0][:120]) from exc
    loaded(form, text)
    return text


def loaded(form: TypeAdapter[T], text: bytes) -> T:
    """From JSON. Raises ValueError in one line."""
    try:
        return form.validate_json(text, strict=True)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step)[:40] for step in first["loc"])
        line = f"{where}: {first['msg'][:80]}" if where else first["msg"][:80]
        raise ValueError(" ".join(line.split())) from exc


def new_id(entropy: bytes, letter: str = "s") -> str:
    """An id of a snapshot, or a group's with "g", from 10 random bytes."""
    return f"{letter}-{base64.b32encode(entropy[:10]).decode().lower()}"
