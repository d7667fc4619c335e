"""vmckpt recover: what is settled, what is not, and its exit codes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.two_copies import ONE, TWO, Found, asked
from tests.tui.still import PROTECT
from vmckpt.app import migration, policies
from vmckpt.cli import app
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.recovery import Recovered


def recovered(settled: Settled) -> Recovered:
    return Recovered(operation=PROTECT.operation, settled=settled)


REFUSED = Settled(truth="safe runs on two hosts", outcome=None, settle="end one", two_copies=True)


@pytest.mark.parametrize(
    ("found", "looks", "code", "words"),
    [
        ([], [ONE], 0, "nothing to recover"),
        ([], [TWO, TWO], 27, "web1 is running on alpha and beta"),
        ([recovered(REFUSED)], [ONE], 27, "safe runs on two hosts"),
        ([recovered(replace(REFUSED, outcome=Outcome.COMPLETED))], [ONE], 0, ""),
        (
            [recovered(replace(REFUSED, two_copies=False))],
            [ONE],
            13,
            "p-9abc: cannot be recovered now",
        ),
    ],
)
def test_recovery_looks_for_it_and_ends_with_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    found: list[Recovered], looks: list[Found], code: int, words: str,
) -> None:  # fmt: skip
    asked(monkeypatch, *looks)

    async def recover(*_: object, **__: object) -> list[Recovered]:
        return found

    monkeypatch.setattr(migration, "recover", recover)
    monkeypatch.setattr(policies, "survey_policies", lambda *_: SimpleNamespace(policies=()))
    assert app.run(["recover"]) == code
    assert words in capsys.readouterr().err
