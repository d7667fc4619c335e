"""Every error this package raises on purpose, with the exit code of the command that meets it.

    VmckptError                      1   anything below; never raised itself
     +-- BadInput                  2   an argument or a file is wrong; nothing was done
     |    +-- InventoryError       3   hosts.yaml is wrong or cannot be found
     |    +-- PolicyError          4   a policy is wrong, cannot be found, or two are for a guest
     |    +-- ReadOnly             5   only looking is allowed
     +-- HypervisorError          10   libvirt or QEMU said no
     |    +-- QemuUnclear         10   not sure which process is a guest's QEMU; none was touched
     |    +-- HostUnreachable     11   no connection to the host's libvirt
     |    +-- OutcomeUnknown      13   a call that changes something may or may not have happened
     |    +-- PeerLoginFailed     15   the source's libvirtd cannot log in at the target's
     +-- RemoteError              12   ssh: no connection, no login, or the command failed
     |    +-- HostKeyRefused      14   the host's ssh key is unknown or has changed
     +-- JournalError             16   the journal cannot be opened, read or written
     +-- OrphanedJobs             17   no controller runs the job any more, or it does not listen
     +-- GuestLocked              18   the guest has an operation already
     +-- LeaseLost                19   another controller has taken over; nothing more was changed
     +-- MigrationFailed          20   the migration ended; the guest runs on the source
     +-- PostcopyPaused           22   the guest waits on the target for the rest of its memory
     +-- Blocked                  21   preflight found reasons not to start; nothing was changed
     +-- GuardRolledBack          23   a guarded command failed; the guest is as it was before
     +-- HookFailed               24   the guest is back, but what was to follow outside failed
     +-- FencingFailed            25   a host may be on; its guest was not started elsewhere
     +-- GuestsRemaining          26   not all guests of a host could be moved
     +-- TwoCopies                27   two hosts run the guest, or one while another has its lease
     +-- LabError                 30   the lab could not do what was asked
     +-- StoreError               40   a snapshot store cannot be opened, read or written
     |    +-- StoreDamaged        41   something in it is not what was written
     |    +-- StoreNewer          42   a newer vmckpt wrote it
     |    +-- KeyRefused          43   the key is missing, or is not the right one
     |    +-- StoreFull           44   there is no room left
     |    +-- NotInStore          45   it has no such object
     +-- CaptureFailed            50   no checkpoint was made; the guest is as it was
     |    +-- CannotCapture       51   this way cannot capture this guest; the message says why
     |    +-- StreamDamaged       52   what QEMU wrote is no whole migration stream
     +-- TimedOut                  1   another guest of its group could not come as far
     +-- Cancelled               130   the operator stopped it (Ctrl-C or SIGTERM)
          +-- Superseded         130   what was prepared is not wanted any more; nothing was changed

An error is one line: what, where, and what to do. `hint` is the last part.
"""

import difflib
from collections.abc import Iterable


class VmckptError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1
    undone: bool = True
    """False: not all of what was set could be put back; its job stays open for recovery."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class BadInput(VmckptError):
    """An argument or a file is wrong."""

    exit_code = 2


class InventoryError(BadInput):
    """hosts.yaml is wrong or cannot be found."""

    exit_code = 3


class PolicyError(BadInput):
    """A policy is wrong or cannot be found, or two of them claim the same guest."""

    exit_code = 4


class ReadOnly(BadInput):
    """Only looking is allowed."""

    exit_code = 5


class HypervisorError(VmckptError):
    """libvirt or QEMU said no."""

    exit_code = 10

    def __init__(
        self, message: str, *, host: str, code: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.host = host
        self.code = code
        """libvirt's VIR_ERR_* number; None when the error is our own."""


class QemuUnclear(HypervisorError):
    """Which process is a guest's QEMU cannot be told for sure, so none is touched."""


class HostUnreachable(HypervisorError):
    """No connection to the host's libvirt."""

    exit_code = 11


class OutcomeUnknown(HypervisorError):
    """A call that changes something may or may not have happened: look at both hosts first."""

    exit_code = 13


class PeerLoginFailed(HypervisorError):
    """The source's libvirtd could not log in at the target's; nothing has happened."""

    exit_code = 15


class RemoteError(VmckptError):
    """ssh: no connection, no login, or the command failed."""

    exit_code = 12
    silent: bool = False
    """The host has not answered in any way; what answers with a refusal is not dead."""


class HostKeyRefused(RemoteError):
    """The host's ssh key is unknown or has changed."""

    exit_code = 14


class JournalError(VmckptError):
    """The journal cannot be opened, read or written."""

    exit_code = 16


class OrphanedJobs(VmckptError):
    """No controller runs the job any more, or it does not listen; nothing was done."""

    exit_code = 17


class GuestLocked(VmckptError):
    """The guest has an operation already."""

    exit_code = 18


class LeaseLost(VmckptError):
    """Another controller has taken over; nothing more was changed."""

    exit_code = 19


class MigrationFailed(VmckptError):
    """The migration ended and the guest runs on the source."""

    exit_code = 20


class PostcopyPaused(VmckptError):
    """A post-copy broke and was not mended; both parts of the guest are kept."""

    exit_code = 22


class Blocked(VmckptError):
    """Preflight found reasons not to start."""

    exit_code = 21


class GuardRolledBack(VmckptError):
    """A guarded command, or the check after it, failed; the guest is as it was before."""

    exit_code = 23


class HookFailed(VmckptError):
    """The guest is back; what had to be compensated outside failed."""

    exit_code = 24


class FencingFailed(VmckptError):
    """A host is not known to be off, and nothing was started in its place."""

    exit_code = 25


class GuestsRemaining(VmckptError):
    """A host was not emptied, or not filled again; what was moved is moved."""

    exit_code = 26


class TwoCopies(VmckptError):
    """A guest runs on two hosts, or on one while another holds its lease."""

    exit_code = 27


class LabError(VmckptError):
    """The lab could not do what was asked."""

    exit_code = 30


class StoreError(VmckptError):
    """A snapshot store cannot be opened, read or written."""

    exit_code = 40


class StoreDamaged(StoreError):
    """Something in the store is not what was written; the message names it."""

    exit_code = 41


class StoreNewer(StoreError):
    """A newer vmckpt wrote it."""

    exit_code = 42


class KeyRefused(StoreError):
    """The key is missing, or is not the right one."""

    exit_code = 43


class StoreFull(StoreError):
    """There is no room left."""

    exit_code = 44


class NotInStore(StoreError):
    """The store has no such object."""

    exit_code = 45


class CaptureFailed(VmckptError):
    """No checkpoint was made; the guest is as it was."""

    exit_code = 50


class CannotCapture(CaptureFailed):
    """This way cannot capture this guest."""

    exit_code = 51


class StreamDamaged(CaptureFailed):
    """What QEMU wrote, or what was kept of it, is no whole migration stream."""

    exit_code = 52


class TimedOut(VmckptError):
    """Another guest of its group could not come as far; the message says how it stands with it."""


class Cancelled(VmckptError):
    """The operator stopped it."""

    exit_code = 130


class Superseded(Cancelled):
    """It was made ready, and is not wanted any more; nothing was changed."""


def meant(word: str, known: Iterable[str], otherwise: str) -> str:
    """The hint for a name that nothing has: those that are nearly it, or what else to do."""
    close = difflib.get_close_matches(word, [*known], n=3)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def at_host(host: str, why: str) -> str:
    """What is wrong there; many errors of hosts begin with its name already."""
    return why if why.startswith(f"{host}: ") else f"{host}: {why}"
