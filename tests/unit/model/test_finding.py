"""What was found, for scripts and for the journal."""

from dataclasses import asdict

from vmckpt.journal.serialization import plain
from vmckpt.model.finding import Finding, Severity

FINDING = Finding(
    code="name-taken", severity=Severity.BLOCKER, where="beta", text="it is taken", hint="rename it"
)


def test_as_json_a_hint_has_kept_its_first_name() -> None:
    assert FINDING.as_json() == {
        "code": "name-taken", "severity": "blocker", "where": "beta", "text": "it is taken",
        "mend": "rename it",
    }  # fmt: skip
    assert "mend" not in asdict(FINDING)


def test_the_journal_keeps_it_as_scripts_are_told_it() -> None:
    assert plain(FINDING) == FINDING.as_json()
