"""What the loop of a guest's own side works with."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from vmckpt.capture.migration_settings import Commands
from vmckpt.replicate.buffers import Buffers
from vmckpt.replicate.capture import Capturer
from vmckpt.replicate.diskcompare import Readable
from vmckpt.replicate.diskepochs import WriteLog
from vmckpt.replicate.finder import CompareFinder
from vmckpt.replicate.leave import Leave
from vmckpt.replicate.link import Line
from vmckpt.replicate.memory import Memory
from vmckpt.replicate.status import PrimaryStatus
from vmckpt.replicate.tenure import Tenure
from vmckpt.replicate.wishes import Wishes


class Mirrors(Protocol):
    """The jobs that bring the guest's writes to the logs."""

    def begin_again(self) -> None:
        """From now on, each into a log that has nothing else."""

    def end(self) -> None:
        """Bring nothing any more."""


class Devices(Protocol):
    """The guest's devices, beside those of its standby."""

    @property
    def told(self) -> bool:
        """Whether libvirt has reported a change since the last whole look."""

    @property
    def gone(self) -> Collection[str]:
        """Names of devices that were not there any more at the last look."""

    def same(self) -> bool:
        """Compare all that the standby must have, too. New cards have no link then."""

    def still(self) -> bool:
        """The same by names alone, which is quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop works with."""

    monitor: Commands
    memory: Memory
    finder: CompareFinder
    capturer: Capturer
    logs: Sequence[WriteLog]
    buffers: Buffers
    tenure: Tenure
    wishes: Wishes
    leave: Leave
    """To go on without the backup."""
    status: PrimaryStatus
    mirrors: Mirrors
    disks: Callable[[], AbstractContextManager[Sequence[Readable]]]
    """The guest's disks, to be read while it runs; in the order of the logs."""
    begun: bool
    """The mirrors have just begun: the backup must begin anew."""
    held: bool
    """An agent before us has put the filters in their place, and output waits."""
    whole: bool
    """A standby that has an epoch may be gone on with."""
    alone: Callable[[bool], None]
    """Note for the agents after us that the standby is worth nothing, or is again."""
    switching: Callable[[], None]
    """Note that the guest stands still from now on for a switch."""
    switch: Callable[[Line], None]
    """The guest stands still and the backup has all of it: give it away for good, and say so."""
    go_on: Callable[[], None]
    """A switch came to nothing: the guest goes on, if it stands still for it."""
    devices: Devices
    is_alone: bool = False
    """It is noted that the standby is worth nothing; see `alone`."""
