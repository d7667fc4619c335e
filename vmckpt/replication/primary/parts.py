"""The objects that the primary's loop works with, and its actions on the guest."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from vmckpt.capture.migration_settings import Commands
from vmckpt.replication.control_socket import Requests
from vmckpt.replication.disks.epoch_log import WriteLog
from vmckpt.replication.disks.resync import Readable
from vmckpt.replication.primary.epoch_capture import Capturer
from vmckpt.replication.primary.lease_holder import LeaseHolder
from vmckpt.replication.primary.memory import ProtectedMemory
from vmckpt.replication.primary.network_buffer import Buffers
from vmckpt.replication.primary.solo_permission import SoloPermission
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.protocol.memory_layout import Dimm
from vmckpt.replication.status import PrimaryStatus


class Mirrors(Protocol):
    """The mirror jobs that copy the guest's disk writes to the logs."""

    def begin_again(self) -> None:
        """Restart the mirrors, each with an empty log."""

    def end(self) -> None:
        """Stop the mirrors."""


class Devices(Protocol):
    """The guest's devices, compared with those of its standby."""

    @property
    def told(self) -> bool:
        """Whether libvirt has reported a device change since the last full check."""

    @property
    def gone(self) -> Collection[str]:
        """Names of devices that were missing at the last check."""

    @property
    def dimms(self) -> Sequence[Dimm]:
        """The DIMMs that the standby lacks, if that was the only difference at the last full
        check; otherwise ()."""

    def accept(self) -> None:
        """Record that the standby has the devices of the last full check. Raises OSError."""

    def same(self) -> bool:
        """Return whether the devices still match the standby's. Takes down new cards' links.

        Raises HypervisorError, OSError.
        """

    def still(self) -> bool:
        """Like `same`, but a quick check that compares only the names of the devices."""


class ProtectedGuest(Protocol):
    """Actions that the loop performs on the guest, and records for later agents."""

    def disks(self) -> AbstractContextManager[Sequence[Readable]]:
        """Open the running guest's disks for reading, in the order of the logs."""

    def note_unprotected(self, unprotected: bool) -> None:
        """Record that the standby is invalid, or valid again."""

    def note_switchover(self) -> None:
        """Record that the guest is paused from now on for a switchover."""

    def hand_over(self, line: PeerConnection) -> None:
        """Hand the guest over to the backup for good.

        The guest must be paused, and the backup must have its complete state.
        """

    def resume(self) -> None:
        """Resume the guest if a switchover or an incomplete epoch has left it paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The objects that the loop works with."""

    monitor: Commands
    memory: ProtectedMemory
    capturer: Capturer
    logs: Sequence[WriteLog]
    buffers: Buffers
    lease_holder: LeaseHolder
    requests: Requests
    leave: SoloPermission
    """Permission to run unprotected."""
    status: PrimaryStatus
    mirrors: Mirrors
    guest: ProtectedGuest
    begun: bool
    """The mirrors have just been started: the backup needs a first copy."""
    held: bool
    """An earlier agent added the filters, so output is already buffered."""
    whole: bool
    """The protection can continue from the standby's last epoch, if the standby has an epoch."""
    devices: Devices
    unprotected: bool = False
    """The standby is recorded as invalid; see `ProtectedGuest.note_unprotected`."""
