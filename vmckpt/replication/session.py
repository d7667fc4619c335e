"""What an agent must know to continue a protection, and how a protection ended.

It is written down before anything is changed: one directory for each protected guest, on tmpfs and
for root alone. It disappears when the host restarts, and so does the guest. A new agent begins with
what it finds there.
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
"""Where earlier versions had these folders."""
_FILE, _MEMORY = "session.json", "memory"
_REPLICATION = "replication"


def folder_of(guest: str) -> Path:
    """Where the agents of a guest (a UUID) have their files on this host.

    Raises RemoteError if others than root can have written there.
    """
    folder, earlier = host_directories.RUN / _REPLICATION / guest, EARLIER / guest
    if folder.exists():
        host_directories.verify(folder)
    elif earlier.exists():
        # Whoever else made one there is not listened to.
        with suppress(RemoteError):
            host_directories.verify(earlier)
            return earlier
    return folder


def make_folder(guest: str) -> Path:
    """Make it, and the one for what is as large as the guest's memory.

    Raises RemoteError as `folder_of`, OSError.
    """
    folder = host_directories.run_dir(_REPLICATION, guest)
    with suppress(FileExistsError):
        (folder / _MEMORY).symlink_to(host_directories.memory_dir(_REPLICATION, guest))
    return folder


def memory_of(folder: Path) -> Path:
    """Where copies of memory and logs of disk writes are that belong to such a folder.

    Raises RemoteError if another user made what is there now, OSError.
    """
    link = folder / _MEMORY
    if not link.is_symlink():
        return folder
    memory = link.readlink()
    if memory.exists():
        host_directories.verify(memory)
    return memory


def remove_folder(folder: Path) -> None:
    """Remove it with all that belongs to it; fine if there is none."""
    memory = None
    with suppress(OSError, RemoteError):  # what is another user's is left alone
        memory = memory_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if memory is not None:
        shutil.rmtree(memory, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Where the lease on the guest is kept, and who we are there."""

    url: str
    """A PostgreSQL URL with the protection's own user and password."""
    ttl: Seconds
    margin: Seconds

    @property
    def terms(self) -> lease_terms.LeaseTerms:
        """What both ends keep to."""
        return lease_terms.LeaseTerms(ttl=self.ttl, margin=self.margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One replicated disk."""

    target: str
    """Its name in the guest: "vda"."""
    size: int
    """Bytes."""
    path: str
    """Of its image on this host."""
    format: str
    taken: bool = False
    """Backup: the image was there before, and stays when the standby goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionTerms:
    """How the guest is to be protected."""

    interval: Seconds | None
    """None: chosen by what an epoch costs."""
    automatic: bool
    """A dead host is left without asking anybody; the primary may be stopped for that."""
    slowdown: float = 0.10
    """For a chosen interval: the share of the guest's time that pauses may take."""
    max_pause: Seconds = Seconds(0.5)
    hold: Seconds = Seconds(5.0)
    """For so long output waits for a backup that is gone, before the guest goes on without it."""
    bandwidth: BytesPerSecond | None = None
    """Most that may be sent in a second, but for the last epoch of a switch; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One end of a protection. `role`: "primary" or "backup"."""

    role: str
    session: str
    guest: str
    """Its UUID."""
    name: str
    host: str
    peer: str
    """The other host's name."""
    uri: str
    terms: ProtectionTerms
    lease: Lease | None
    disks: tuple[Disk, ...]
    address: str
    """Where the backup listens."""
    port: int
    owner: tuple[int, int]
    """As whom QEMU runs here."""
    cards: tuple[str, ...] = ()
    """Primary: whose output is held."""
    undo: str = ""
    """Primary: what is changed in QEMU, as migration_settings.Undo's JSON."""
    definition: str = ""
    """Primary: the stored definition, which is gone while it is protected; backup: the one that is
    stored once the guest runs there."""
    state: str = ""
    """Backup: a folder on disk for epochs' writes."""
    moves: bool = False
    """It is a migration: it ends with the switch, before which nobody may take over."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_leave(self) -> bool:
        """Only the controller can know that no standby is made to run: it powers hosts off."""
        return self.terms.automatic and self.lease is None and not self.moves

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        atomic_file.put(folder / _FILE, json.dumps(asdict(self)), private=True)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """None: there is none. Raises BadInput."""
        try:
            told = json.loads((folder / _FILE).read_text())
            return cls.from_json(told)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OSError) as exc:
            raise BadInput(f"{folder / _FILE} makes no sense: {exc}") from exc

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Raises TypeError, KeyError."""
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
    """What became of the guest, or of its standby."""

    FAILED_OVER = "failed-over"
    """It runs on the backup."""
    SWITCHED = "switched"
    """It went over as planned: the primary's word for it."""
    ENDED = "ended"
    """By somebody's wish."""
    DIED = "died"
    """Its QEMU did, on the primary."""
    LOST = "lost"
    """The standby's QEMU is gone."""
