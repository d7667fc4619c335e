"""What was found, for scripts and for the journal."""

from dataclasses import asdict

from vmckpt.journal.serialization import plain
from vmckpt.model.finding import Finding, Severity

FINDING = Finding(
    code="name-taken", severity=Severity.BLOCKER, where="beta", text="it is taken", hint="rename it"
)


def test_as_json_has_the_hint_under_its_old_name_too() -> None:
    assert FINDING.as_json() == {
        "code": "name-taken", "severity": "blocker", "where": "beta", "text": "it is taken",
        "hint": "rename it", "mend": "rename it",
    }  # fmt: skip
    assert "mend" not in asdict(FINDING)


def test_the_journal_keeps_the_name_that_old_versions_read() -> None:
    assert plain(FINDING) == {k: v for k, v in FINDING.as_json().items() if k != "hint"}
