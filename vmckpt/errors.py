"""The errors that this package raises deliberately, with the exit code of each.

    VmckptError                      1   base of the errors below; also raised itself
     +-- BadInput                  2   an argument or a file is invalid; nothing was changed
     |    +-- InventoryError       3   hosts.yaml is invalid or cannot be found
     |    +-- PolicyError          4   a policy is invalid or missing, or two match a guest equally
     |    +-- ReadOnly             5   read-only mode forbids the change
     |    +-- NotPermitted         7   the user lacks the role that the command needs
     +-- AlertNotDelivered         6   a receiver of alerts did not accept a test alert
     +-- HypervisorError          10   libvirt or QEMU returned an error
     |    +-- QemuUnclear         10   a guest's QEMU process is ambiguous; no process was touched
     |    +-- HostUnreachable     11   the host's libvirt cannot be reached or does not answer
     |    +-- OutcomeUnknown      13   it is unknown whether a call took effect
     |    +-- PeerLoginFailed     15   the source's libvirtd cannot log in to the target's
     |    +-- MigrationRefused    10   libvirt refuses the migration; nothing was changed
     +-- RemoteError              12   the ssh connection, the login or the remote command failed
     |    +-- HostKeyRefused      14   the host's ssh key is unknown or has changed
     +-- JournalError             16   the journal cannot be opened, read or written
     +-- OrphanedJobs             17   no live controller runs the job, or it does not respond
     +-- GuestLocked              18   a guest or host is locked, or its state forbids the request
     +-- LeaseLost                19   a job or lease was lost to another process or host, or ended
     +-- MigrationFailed          20   the migration failed; the guest runs on the source or is off
     +-- PostcopyPaused           22   the guest waits on the target for the rest of its memory
     +-- Blocked                  21   preflight found blockers; nothing was changed
     +-- GuardRolledBack          23   a guarded command failed; the guest is as it was before
     +-- HookFailed               24   a command of a restore, a fork or rolling maintenance failed
     +-- FencingFailed            25   a host may be on; its guest was not started elsewhere
     +-- GuestsRemaining          26   not all guests of a host could be moved
     +-- TwoCopies                27   two hosts run the guest, or another host holds its lease
     +-- AuditBroken              28   the audit trail was edited, or its end was removed
     +-- LabError                 30   the lab could not carry out the request
     +-- StoreError               40   a snapshot store cannot be opened, read or written
     |    +-- StoreDamaged        41   an object differs from what was written, or is missing
     |    +-- StoreNewer          42   the store was written by a newer version of vmckpt
     |    +-- KeyRefused          43   the key is missing or is the wrong one
     |    +-- StoreFull           44   no space is left
     |    +-- NotInStore          45   the store has no such object
     +-- CaptureFailed            50   no checkpoint was made
     |    +-- CannotCapture       51   the guest cannot be captured now, or not by this method
     |    +-- StreamDamaged       52   QEMU's migration stream is invalid or incomplete
     +-- TimedOut                  1   another guest in the group did not reach the same step
     +-- Cancelled               130   the operator stopped the operation (Ctrl-C, SIGTERM)
          +-- Superseded         130   a prepared move was dropped; nothing was changed

Other modules define further subclasses. An error message is one line: what is wrong, with the
object's name, then what to do, which is the `hint`.
"""

import difflib
from collections.abc import Iterable, Mapping
from shlex import quote


class VmckptError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1
    undone: bool = True
    """Whether all changes were reverted; if not, the job stays open for recovery."""

    def __init__(self, message: str, *, host: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.host = host
        """The host that the error is about, or whose agent reported it; None if unknown."""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class BadInput(VmckptError):
    """An argument or a file is invalid."""

    exit_code = 2


class InventoryError(BadInput):
    """hosts.yaml is invalid or cannot be found."""

    exit_code = 3


class PolicyError(BadInput):
    """A policy is invalid or cannot be found, or two policies match a guest equally well."""

    exit_code = 4


class ReadOnly(BadInput):
    """Read-only mode forbids the change."""

    exit_code = 5


class NotPermitted(BadInput):
    """The user lacks the role that the command needs."""

    exit_code = 7


class AlertNotDelivered(VmckptError):
    """A receiver of alerts did not accept a test alert."""

    exit_code = 6


class HypervisorError(VmckptError):
    """libvirt or QEMU returned an error, or an answer that vmckpt cannot use."""

    exit_code = 10
    host: str

    def __init__(
        self, message: str, *, host: str, code: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, host=host, hint=hint)
        self.code = code
        """libvirt's VIR_ERR_* number; None if the error is not libvirt's."""


class QemuUnclear(HypervisorError):
    """The QEMU process of a guest cannot be identified with certainty; no process was touched."""


class HostUnreachable(HypervisorError):
    """The host's libvirt cannot be reached, or does not answer in time."""

    exit_code = 11


class OutcomeUnknown(HypervisorError):
    """It is unknown whether a call took effect; examine the hosts before acting."""

    exit_code = 13


class PeerLoginFailed(HypervisorError):
    """The source's libvirtd could not log in to the target's; nothing was changed."""

    exit_code = 15


class MigrationRefused(HypervisorError):
    """libvirt refuses to migrate the guest; another attempt would be refused, too."""

    of_guest: bool = False
    """Whether the guest's definition or state is the reason, so any target would be refused."""


class RemoteError(VmckptError):
    """The ssh connection, the login or the remote command failed."""

    exit_code = 12
    silent: bool = False
    """Whether the host sent no reply at all. A host that refuses the connection is not silent."""


class HostKeyRefused(RemoteError):
    """The host's ssh key is unknown or has changed."""

    exit_code = 14


class JournalError(VmckptError):
    """The journal cannot be opened, read or written."""

    exit_code = 16


class OrphanedJobs(VmckptError):
    """The job has no live controller, or the controller does not respond; nothing was changed."""

    exit_code = 17


class GuestLocked(VmckptError):
    """Another operation holds a lock on the guest or host, or its state forbids the request."""

    exit_code = 18
    interrupted: bool = False
    """Whether the other operation has lost its controller, so only recovery releases the lock."""


class LeaseLost(VmckptError):
    """This process lost its job, or its host lost a lease or did not renew the lease in time.

    Nothing more was changed.
    """

    exit_code = 19


class MigrationFailed(VmckptError):
    """The migration failed; the guest is running on the source, unless it stopped meanwhile."""

    exit_code = 20


class PostcopyPaused(VmckptError):
    """A post-copy migration broke and was not recovered; both parts of the guest are kept."""

    exit_code = 22


class Blocked(VmckptError):
    """Preflight found blockers; nothing was changed."""

    exit_code = 21


class GuardRolledBack(VmckptError):
    """A guarded command or its check failed; the guest was restored to its checkpoint."""

    exit_code = 23


class HookFailed(VmckptError):
    """A command run after a restore, for forks, or during rolling maintenance, failed."""

    exit_code = 24


class FencingFailed(VmckptError):
    """A host could not be confirmed to be off, so its guest was not started elsewhere."""

    exit_code = 25


class GuestsRemaining(VmckptError):
    """Some guests could not be moved off a host, or back to it. Completed moves are kept."""

    exit_code = 26


class TwoCopies(VmckptError):
    """A guest is running on two hosts, or on one host while another host holds its lease."""

    exit_code = 27


class AuditBroken(VmckptError):
    """The audit trail in the journal was edited, or its end was removed."""

    exit_code = 28


class LabError(VmckptError):
    """The lab could not carry out the request."""

    exit_code = 30


class StoreError(VmckptError):
    """A snapshot store cannot be opened, read or written."""

    exit_code = 40


class StoreDamaged(StoreError):
    """An object in the store differs from what was written, or is missing."""

    exit_code = 41


class StoreNewer(StoreError):
    """A newer version of vmckpt wrote the store or the object."""

    exit_code = 42


class KeyRefused(StoreError):
    """The key is missing or is the wrong one."""

    exit_code = 43


class StoreFull(StoreError):
    """The store has no space left."""

    exit_code = 44


class NotInStore(StoreError):
    """The store has no such object."""

    exit_code = 45


class CaptureFailed(VmckptError):
    """No checkpoint was made; unless the message says otherwise, the guest is unchanged."""

    exit_code = 50


class CannotCapture(CaptureFailed):
    """The guest cannot be captured now, or not by this method."""

    exit_code = 51


class StreamDamaged(CaptureFailed):
    """QEMU's migration stream is invalid or incomplete."""

    exit_code = 52


class TimedOut(VmckptError):
    """Another guest in the group did not reach the same step.

    The message gives the state of the guest that was waiting.
    """


class Cancelled(VmckptError):
    """The operator stopped the operation."""

    exit_code = 130


class Superseded(Cancelled):
    """A prepared move was dropped before it changed anything.

    Another move goes first, or the target has changed.
    """


def meant(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint for an unknown name: up to three similar `known` names, else `otherwise`."""
    close = difflib.get_close_matches(word, [*known], n=3)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def at_host(host: str, why: str) -> str:
    """Prefix an error message with the host's name, unless it already begins with that name."""
    return why if why.startswith(f"{host}: ") else f"{host}: {why}"


def some(names: Iterable[str], most: int = 3) -> str:
    """Return names in one line: at most `most` of them, and how many more there are."""
    all_names = list(names)
    more = f" and {len(all_names) - most} more" if len(all_names) > most else ""
    return ", ".join(all_names[:most]) + more


def silent_hosts(errors: Mapping[str, str], most: int = 3) -> str:
    """Describe hosts that do not answer in one short line, for use after "no answer from".

    `errors`: why each host does not answer, by host. With more than `most` hosts, only the first
    host's reason is given.
    """
    if len(errors) <= most:
        return "; ".join(at_host(*one) for one in errors.items())
    return f"{some(errors, most)}; {at_host(*next(iter(errors.items())))}"


def run_doctor(hosts: Iterable[str], most: int = 3) -> str:
    """Return the hint to examine the first `most` hosts: many failures may have one cause."""
    return f"run vmckpt doctor {' '.join(quote(name) for name in list(hosts)[:most])}"
