"""Something that was looked at and is worth saying: a blocker, a warning, or that it is fine."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum

STORED_AS = "stored as"
"""In a field's metadata: its key in the journal, where that is another one than its name."""


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
    """Host or guest it is about."""
    text: str
    hint: str | None = field(default=None, metadata={STORED_AS: "mend"})
    """What to do about it, a command where there is one; None when nothing needs doing."""

    def as_json(self) -> dict[str, str | None]:
        """For the journal and --json, where the hint has kept its first name."""
        told = asdict(self)
        return {"mend" if name == "hint" else name: told[name] for name in told}
