"""A result of a check: a blocker, a warning, a note, or confirmation that all is well."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum

STORED_AS = "stored as"
"""Key in a field's metadata: the field's name in the journal, if it differs."""


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    BLOCKER = "blocker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check."""

    code: str
    """Stable name, for scripts: "name-taken"."""
    severity: Severity
    where: str
    """The host or guest that the finding is about."""
    text: str
    hint: str | None = field(default=None, metadata={STORED_AS: "mend"})
    """What to do, if possible as a command; None if there is nothing to do."""

    def as_json(self) -> dict[str, str | None]:
        """Return the object for `--json`; "mend" is the deprecated name of "hint"."""
        return {**asdict(self), "mend": self.hint}


def blocker(code: str, where: str, text: str, hint: str | None) -> Finding:
    """Return a finding that forbids the operation."""
    return Finding(code=code, severity=Severity.BLOCKER, where=where, text=text, hint=hint)


def warning(code: str, where: str, text: str, hint: str | None = None) -> Finding:
    """Return a finding about something that may go wrong."""
    return Finding(code=code, severity=Severity.WARNING, where=where, text=text, hint=hint)
