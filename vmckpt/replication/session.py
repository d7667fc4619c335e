"""The data that an agent needs to continue a protection, and how a protection ended.

Each protected guest has a directory on tmpfs that only root can read. The session is written there
before anything is changed. When the host restarts, the directory is gone, and so is the guest. A
new agent continues from the data in the directory.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from vmckpt.errors import BadInput, RemoteError
from vmckpt.lease import terms as lease_terms
from vmckpt.units import BytesPerSecond, Seconds
from vmckpt.util import atomic_file, host_directories

EARLIER = Path("/dev/shm/vmckpt-replica")
"""Where earlier versions kept these directories."""
_FILE, _MEMORY = "session.json", "memory"
_REPLICATION = "replication"


def folder_of(guest: str) -> Path:
    """Return the directory of a guest's agents on this host; `guest` is a UUID.

    Raises RemoteError if users other than root may have written there, and OSError.
    """
    folder, earlier = host_directories.RUN / _REPLICATION / guest, EARLIER / guest
    if folder.exists():
        host_directories.verify(folder)
    elif earlier.exists():
        # An earlier directory is ignored if another user created it.
        with suppress(RemoteError):
            host_directories.verify(earlier)
            return earlier
    return folder


def make_folder(guest: str) -> Path:
    """Create the guest's directory, and another directory for files as large as its memory.

    Returns the guest's directory. Raises OSError, and RemoteError as `folder_of` does.
    """
    folder = host_directories.run_dir(_REPLICATION, guest)
    with suppress(FileExistsError):
        (folder / _MEMORY).symlink_to(host_directories.memory_dir(_REPLICATION, guest))
    return folder


def private_blocks(session: "Session") -> list[tuple[str, int]] | None:
    """Return name and size of each block of memory that is captured without QEMU's migration.

    The guest's own memory is not among them. None: QEMU's migration captures these blocks.
    """
    found = session.extra.get("private")
    return None if found is None else [(str(name), int(size)) for name, size in found]


def memory_of(folder: Path) -> Path:
    """Return the directory for memory copies and disk write logs of the guest's `folder`.

    Raises OSError, and RemoteError if another user created that directory.
    """
    link = folder / _MEMORY
    if not link.is_symlink():
        return folder
    memory = link.readlink()
    if memory.exists():
        host_directories.verify(memory)
    return memory


def remove_folder(folder: Path) -> None:
    """Remove a guest's directory and memory directory; does nothing if they do not exist."""
    memory = None
    with suppress(OSError, RemoteError):  # another user's files are left alone
        memory = memory_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if memory is not None:
        shutil.rmtree(memory, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The lease on the guest: its lease store, login and times."""

    url: str
    """A PostgreSQL URL with the protection's own user and password."""
    ttl: Seconds
    margin: Seconds

    @property
    def terms(self) -> lease_terms.LeaseTerms:
        """The lease times that the primary and the backup adhere to."""
        return lease_terms.LeaseTerms(ttl=self.ttl, margin=self.margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One replicated disk."""

    target: str
    """The disk's name in the guest, for example "vda"."""
    size: int
    """Size of the disk, in bytes."""
    path: str
    """Path of the disk's image on this host."""
    format: str
    taken: bool = False
    """Backup: the image existed before the protection, and is kept when the standby is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionTerms:
    """How the guest is to be protected."""

    interval: Seconds | None
    """Time between two epochs; None: it depends on the cost of an epoch."""
    automatic: bool
    """Fail over from a dead host without an operator. This may kill the guest on the primary."""
    slowdown: float = 0.10
    """Without a fixed interval: the share of the guest's time that pauses may take, 0 to 1."""
    max_pause: Seconds = Seconds(0.5)
    hold: Seconds = Seconds(5.0)
    """Time from losing the backup until permission to run unprotected is requested."""
    bandwidth: BytesPerSecond | None = None
    """Maximum send rate, except for the last epoch of a switchover; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One end of a protection. `role` is "primary" or "backup"."""

    role: str
    session: str
    guest: str
    """The guest's UUID."""
    name: str
    host: str
    peer: str
    """The other host's name."""
    uri: str
    terms: ProtectionTerms
    lease: Lease | None
    disks: tuple[Disk, ...]
    address: str
    """The address on which the backup listens."""
    port: int
    owner: tuple[int, int]
    """User and group IDs that QEMU runs as on this host."""
    cards: tuple[str, ...] = ()
    """Primary: the network cards whose output is buffered."""
    undo: str = ""
    """Primary: how to undo what an epoch changes in QEMU: `migration_settings.Undo` as JSON."""
    definition: str = ""
    """Primary: the guest's persistent definition, which is removed while the guest is protected;
    backup: the definition to store once the guest runs there."""
    state: str = ""
    """Backup: a directory on disk for the disk writes of epochs."""
    moves: bool = False
    """The session is a migration: it ends with the switchover, and the standby may not take over
    before that."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_leave(self) -> bool:
        """Whether the guest needs the controller's permission to run unprotected.

        Without a lease store, only the controller, which powers hosts off, knows whether a standby
        is about to run.
        """
        return self.terms.automatic and self.lease is None and not self.moves

    def write(self, folder: Path) -> None:
        """Write the session to a guest's directory. Raises OSError."""
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        atomic_file.put(folder / _FILE, json.dumps(asdict(self)), private=True)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the session from a guest's directory. Returns None if it has no session file.

        Raises BadInput if the file is invalid or cannot be read.
        """
        try:
            told = json.loads((folder / _FILE).read_text())
            return cls.from_json(told)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OSError) as exc:
            raise BadInput(f"{folder / _FILE} cannot be read as a session: {exc}") from exc

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Build a session from parsed JSON. Raises TypeError, KeyError if it is invalid."""
        lease = told["lease"]
        return cls(
            **{
                **told,
                "terms": ProtectionTerms(**told["terms"]),
                "lease": None if lease is None else Lease(**lease),
                "disks": tuple(Disk(**one) for one in told["disks"]),
                "owner": tuple(told["owner"]),
                "cards": tuple(told["cards"]),
            }
        )


class ProtectionOutcome(StrEnum):
    """How a protection ended."""

    FAILED_OVER = "failed-over"
    """The guest is running on the backup."""
    SWITCHED = "switched"
    """The guest was switched over as planned, as reported by the primary."""
    ENDED = "ended"
    """The guest shut down, panicked or was stopped on request."""
    DIED = "died"
    """The guest's QEMU on the primary is gone."""
    LOST = "lost"
    """The standby's QEMU is gone."""
