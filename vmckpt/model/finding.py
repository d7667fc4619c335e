"""Something that was looked at and is worth saying: a blocker, a warning, or that it is fine."""

from dataclasses import asdict, dataclass
from enum import StrEnum


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
    mend: str | None = None
    """What to do about it, a command where there is one; None when nothing needs doing."""

    def as_json(self) -> dict[str, str | None]:
        return asdict(self)
