"""A protection that could not be begun because its guest died: what is left of the guest stays."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vmckpt.errors import VmckptError
from vmckpt.lease import client
from vmckpt.model.host import Host
from vmckpt.protection import agent_client, start
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.start import Beginning, outlived

DIED: Mapping[str, Any] = {"role": "primary", "runs": False, "outcome": "died"}
READY: Mapping[str, Any] = {"role": "backup", "runs": True, "ready": True}


@pytest.mark.parametrize(
    ("ours", "theirs", "whole"),
    [
        (DIED, READY, True), ({**DIED, "alone": True}, READY, False), ({}, READY, False),
        ({**DIED, "runs": True}, READY, False), ({**DIED, "outcome": "ended"}, READY, False),
        (DIED, {**READY, "ready": False}, False), (DIED, {"error": "beta is silent"}, False),
    ],
)  # fmt: skip
def test_a_standby_outlives_a_guest_that_died_and_was_not_heard_since(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], whole: bool
) -> None:
    assert outlived(parse_answer(ours), parse_answer(theirs)) is whole


@pytest.mark.parametrize("ready", [True, False])
async def test_a_standby_that_is_all_there_is_of_a_guest_is_not_removed(
    monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    says = {"alpha": DIED, "beta": {**READY, "ready": ready}}
    ended: list[str] = []
    warned: list[str] = []

    async def status(host: Host, guest: str) -> ProtectionStatus:
        return parse_answer(dict(says[host.name]))

    async def order(host: Host, guest: str, what: str, **_: Any) -> dict[str, Any]:
        ended.append(f"{host.name} {what}")
        return {"did": []}

    monkeypatch.setattr(agent_client, "status", status)
    monkeypatch.setattr(agent_client, "order", order)
    hosts = [Host(name=name, uri=f"qemu+tcp://{name}/system") for name in ("alpha", "beta")]
    setting = SimpleNamespace(primary=hosts[0], backup=hosts[1], lease=None)
    beginning = Beginning.__new__(Beginning)
    vars(beginning).update(
        _setting=setting, _request=SimpleNamespace(move=None, automatic=True), session="5e55",
        _guest=SimpleNamespace(uuid="u-1", name="web1"),
        _caller=SimpleNamespace(warn=warned.append),
    )  # fmt: skip
    why = VmckptError("the guest's agent on alpha has ended")
    await beginning._undo(cast("BaseException", why))

    assert ended == ([] if ready else ["beta end", "alpha end"])
    assert why.undone is not ready
    assert (
        warned
        == [
            "web1 died on alpha, but its standby is complete: run it with vmckpt failover web1",
        ][: len(warned)]
    )
    assert bool(warned) is ready


@pytest.mark.parametrize(
    ("lease", "automatic", "noted"), [(None, True, ["alone"]), (None, False, []), ("u", True, [])]
)
async def test_what_keeps_watch_must_not_run_a_standby_that_is_given_up_and_stays_behind(
    monkeypatch: pytest.MonkeyPatch, lease: str | None, automatic: bool, noted: list[str]
) -> None:
    did: list[str] = []

    async def order(host: Host, guest: str, what: str, **_: Any) -> dict[str, Any]:
        if host.name == "beta":
            raise VmckptError("beta is silent")
        did.append(what)
        return {"did": []}

    async def status(*_: object) -> ProtectionStatus:
        return parse_answer({})

    async def intend(step: str, _: Mapping[str, Any]) -> None:
        did.append(step)

    monkeypatch.setattr(agent_client, "status", status)
    monkeypatch.setattr(agent_client, "order", order)
    monkeypatch.setattr(client, "revoke", lambda *_, **__: None)
    hosts = [Host(name=name, uri=f"qemu+tcp://{name}/system") for name in ("alpha", "beta")]
    beginning = Beginning.__new__(Beginning)
    vars(beginning).update(
        _setting=SimpleNamespace(primary=hosts[0], backup=hosts[1], lease=lease),
        _request=SimpleNamespace(move=None, automatic=automatic), session="5e55",
        _guest=SimpleNamespace(uuid="u-1", name="web1"), _step_log=SimpleNamespace(intend=intend),
        _caller=SimpleNamespace(warn=lambda _: None),
    )  # fmt: skip
    await beginning._undo(VmckptError("stopped"))
    assert did == [*noted, "end"]


async def test_a_primary_that_cannot_be_asked_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def status(*_: object) -> ProtectionStatus:
        return parse_answer({"error": "alpha: Permission denied (publickey)"})

    monkeypatch.setattr(agent_client, "status", status)
    monkeypatch.setattr(start, "_PATIENCE", -1.0)
    beginning = Beginning.__new__(Beginning)
    vars(beginning).update(
        _setting=SimpleNamespace(primary=SimpleNamespace(name="alpha")),
        _guest=SimpleNamespace(uuid="u-1", name="web1"),
        _caller=SimpleNamespace(stop=asyncio.Event()),
    )  # fmt: skip
    with pytest.raises(VmckptError, match="Permission denied"):
        await beginning._until_ready(lambda _: None)
