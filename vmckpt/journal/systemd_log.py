"""Log operations to systemd's journal, with fields that journalctl can search for.

Each entry is one datagram of journald's native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).
Entries are copies of what vmckpt's own journal records (docs/monitoring.md).
"""

import errno
import fcntl
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from vmckpt.journal import wording
from vmckpt.journal.audit_chain import AuditEntry
from vmckpt.journal.records import MAINTENANCE, WHOLE_HOST, Batch, NewOperation, Operation
from vmckpt.model.migration import Outcome

VARIABLE = "VMCKPT_JOURNALD"
"""Environment variable with the path of journald's socket, or "none" to log nothing."""
_SOCKET = "/run/systemd/journal/socket"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

BEGAN = "cc1b8b1ec3044c18944c35ec12c3976b"
"""MESSAGE_ID of the beginning of an operation, or its takeover by another controller."""
EVENT = "b67d89a763d94b3c9ceb252b72acaf3d"
"""MESSAGE_ID of an event during an operation."""
ENDED = "4037e1d9d16e42f7bdb9ac89757c7f9a"
"""MESSAGE_ID of the end of an operation."""

AUDITED = "4f0c51c0a2d84d0f9f3fbb6a7a0e35d1"
"""MESSAGE_ID of an entry of the audit trail."""

_CRITICAL, _ERROR, _NOTICE, _INFO, _DEBUG = 2, 3, 5, 6, 7
_PRIORITIES: Mapping[str, int] = {
    Outcome.COMPLETED: _INFO, Outcome.PLANNED: _INFO, Outcome.CANCELLED: _NOTICE,
    Outcome.LOST: _CRITICAL, Outcome.UNKNOWN: _CRITICAL, Outcome.POST_COPY_PAUSED: _CRITICAL,
}  # fmt: skip
"""Priorities (syslog levels) of outcomes. Every other outcome is an error."""


class SystemdLog:
    """The entries of one operation.

    No method waits or raises: an entry that journald does not accept at once is dropped.
    """

    def __init__(self, job: str, operation: NewOperation | Operation) -> None:
        self._operation = {
            "JOB": job, "KIND": operation.kind, "GUEST": operation.guest,
            "GUEST_UUID": operation.guest_uuid, "SOURCE": operation.source,
            "TARGET": operation.target, "POLICY": operation.policy,
        }  # fmt: skip

    def began(self, asked_by: str) -> None:
        """Log the beginning of the operation. `asked_by`: user@host."""
        self._send(BEGAN, "began", _INFO, f"{self._title} began, requested by {asked_by}")

    def taken_over(self) -> None:
        """Log that this process has become the operation's controller."""
        self._send(BEGAN, "taken-over", _NOTICE, f"{self._title} has a new controller")

    def take(self, batch: Batch) -> None:
        """Log the changes, the events and the end in a batch of records."""
        for name, value in batch.changes.items():
            if name.upper() in self._operation:
                self._operation[name.upper()] = str(value)
        for one in batch.events:
            if text := wording.event(one.kind, one.values):
                self._send(EVENT, one.kind, _INFO, f"{self._title}: {text}")
        if batch.ending is not None:
            self.ended(*batch.ending)

    def ended(self, outcome: str, report: Mapping[str, object] | None) -> None:
        """Log the end of the operation."""
        error = (report or {}).get("error")
        priority = _PRIORITIES.get(outcome, _ERROR)
        text = f"{self._title} ended: {outcome}" + (f": {error}" if error else "")
        self._send(ENDED, "ended", priority, text, outcome)

    @property
    def _title(self) -> str:
        one = self._operation
        on = f" on {one['SOURCE']}" if one["SOURCE"] not in (None, one["GUEST"]) else ""
        way = f" from {one['SOURCE']} to {one['TARGET']}" if one["TARGET"] else on
        return f"{one['JOB']}: {one['KIND']} of {one['GUEST']}{way}"

    def _send(
        self, id_: str, event: str, priority: int, text: str, outcome: str | None = None
    ) -> None:
        about = {**self._operation, "EVENT": event, "OUTCOME": outcome}
        if about["KIND"] in (*WHOLE_HOST, MAINTENANCE):
            about["GUEST"] = None  # the record has the host's name there
        _log(id_, priority, text, about)


def audited(entry: AuditEntry) -> None:
    """Log the number and the digest of an entry of the audit trail, which becomes its head.

    The copy reveals that the trail was rewritten or its end was removed. Does not wait or raise.
    """
    deed, actor = entry.fact.deed, entry.fact.actor
    about = {
        "EVENT": "audited", "JOB": deed.job, "KIND": deed.kind, "SOURCE": deed.source,
        "GUEST": None if deed.kind in (*WHOLE_HOST, MAINTENANCE) else deed.guest,
        "TARGET": deed.target, "OUTCOME": deed.outcome, "AUDIT_SEQ": str(entry.seq),
        "AUDIT_HEAD": entry.digest,
    }  # fmt: skip
    what = " ".join(str(one) for one in (deed.what, deed.step, deed.outcome) if one)
    about_what = deed.job or deed.guest or "no guest"
    text = f"audit entry {entry.seq}, {actor.user}: {about_what} {what}; head {entry.digest}"
    _log(AUDITED, _DEBUG, text, about)


def _log(id_: str, priority: int, text: str, about: Mapping[str, str | None]) -> None:
    path = os.environ.get(VARIABLE, _SOCKET)
    if path == "none" or not os.path.exists(path):  # noqa: PTH110 – also of invalid paths
        return
    fields = {
        "MESSAGE": text, "MESSAGE_ID": id_, "PRIORITY": str(priority),
        "SYSLOG_IDENTIFIER": "vmckpt",
        **{f"VMCKPT_{name}": value for name, value in about.items() if value is not None},
    }  # fmt: skip
    with suppress(OSError):
        _write(path, encoded(fields))


def encoded(fields: Mapping[str, str]) -> bytes:
    """Return the entry as journald expects it. Names must be valid; values may be any text."""
    parts = []
    for name, value in fields.items():
        data = value.encode("utf-8", "replace")
        if b"\n" in data:  # such a value needs its length, or it could add fields of its own
            parts += [name.encode(), b"\n", len(data).to_bytes(8, "little"), data, b"\n"]
        else:
            parts += [name.encode(), b"=", data, b"\n"]
    return b"".join(parts)


def _write(path: str, entry: bytes) -> None:
    """Send an entry: in a datagram or, if it is too large for one, in a sealed memory file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        out.connect(path)
        try:
            out.send(entry)
            return
        except OSError as exc:
            if exc.errno not in (errno.EMSGSIZE, errno.ENOBUFS):
                raise
        file = os.memfd_create("vmckpt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(file, "wb", closefd=False) as target:
                target.write(entry)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            socket.send_fds(out, [], [file])
        finally:
            os.close(file)
