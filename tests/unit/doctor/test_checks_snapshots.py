"""What doctor says of snapshots."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.stocking import stocked
from vmckpt.cli import app
from vmckpt.doctor import checks
from vmckpt.doctor.checks import ControllerReady, HostReady, StoreReady
from vmckpt.model.finding import Finding, Severity
from vmckpt.units import Bytes

GOOD = HostReady(
    name="alpha", agent=None, state="/var/lib/vmckpt/agent", room=Bytes(50 << 30),
    stores={"near": None},
)  # fmt: skip
OWN = ControllerReady(stores={"near": StoreReady()}, admins=("alice",), keys=None)


def wrong(found: list[Finding]) -> list[str]:
    assert all(one.severity in (Severity.OK, Severity.WARNING) for one in found)
    assert all((one.hint is None) == (one.severity is Severity.OK) for one in found)
    return [f"{one.where}: {one.text}" for one in found if one.severity is Severity.WARNING]


@pytest.mark.parametrize(
    ("examined", "told"),
    [
        (GOOD, []),
        (replace(GOOD, agent="no vmckpt-agent there"), ["alpha: no vmckpt-agent there"]),
        (replace(GOOD, room=None), ["alpha: /var/lib/vmckpt/agent is not writable"]),
        (
            replace(GOOD, room=Bytes(1 << 30)),
            ["alpha: /var/lib/vmckpt/agent: 1.0 GiB free; a capture stores a guest's memory there"],
        ),
        (
            replace(GOOD, stores={"near": "/s is not writable", "far": None}),
            ["alpha: store near: /s is not writable"],
        ),
    ],
)
def test_a_host(examined: HostReady, told: list[str]) -> None:
    assert wrong(list(checks.of_host(examined))) == told


@pytest.mark.parametrize(
    ("examined", "told"),
    [
        (OWN, []),
        (replace(OWN, admins=()), ["controller: snapshots are not encrypted"]),
        (replace(OWN, keys="k: others can read it"), ["controller: k: others can read it"]),
        (
            replace(OWN, stores={"near": StoreReady(wrong="no answer")}),
            ["controller: store near: no answer"],
        ),
    ],
)
def test_the_controller(examined: ControllerReady, told: list[str]) -> None:
    assert wrong(list(checks.of_controller(examined))) == told


@pytest.mark.parametrize(("tried", "told"), [(True, ", and its locks work"), (False, "")])
def test_a_store_is_told_to_hold_locks_only_if_that_was_tried(tried: bool, told: str) -> None:
    own = replace(OWN, stores={"near": StoreReady(tried=tried)})
    assert next(checks.of_controller(own)).text == f"store near: can be opened{told}"


def test_the_command_tells_of_stores_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = stocked(tmp_path, monkeypatch, capsys)
    (stock.folder / "far" / "format").unlink()
    app.run(["doctor", "--json", "--quiet"])
    found = json.loads(capsys.readouterr().out)
    told = {one["text"] for one in found if one["where"] == "controller"}
    assert told == {f"store far: {tmp_path}/far is not a store", "snapshots are not encrypted"}
    stock.encrypt()
    app.run(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert "snapshots are encrypted for alice" in {one["text"] for one in found}
