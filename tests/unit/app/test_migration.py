"""Migrations by the facade: from where a guest is moved, and what is resumed."""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.happenings import WEB1, journal
from tests.support.two_copies import HOSTS, INVENTORY, ONE, TWO, WEB, Found, asked
from vmckpt import recovery
from vmckpt.app import controller as app_controller
from vmckpt.app import fleet, migration
from vmckpt.errors import BadInput, GuestLocked, HostUnreachable, OutcomeUnknown
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs
from vmckpt.journal.store import Journal
from vmckpt.migration.request import MigrateRequest
from vmckpt.model.events import Caller
from vmckpt.model.guest import GuestJob, GuestState

__all__ = ["journal"]
NO_HOSTS = Inventory(path=Path("hosts.yaml"), hosts={}, observer=None)
NOBODY = Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())


@pytest.mark.parametrize(
    ("kind", "entrusted", "says"),
    [
        ("protect", True, r"\(kind: protect\) is run by vmckpt's agents on its hosts"),
        ("snapshot", False, r"\(kind: snapshot\) cannot be resumed; only migrations"),
    ],
)
async def test_only_a_migration_is_resumed(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, kind: str, entrusted: bool, says: str
) -> None:
    monkeypatch.setattr(jobs, "open_journal", lambda: nullcontext(journal))
    id_ = journal.begin(replace(WEB1, kind=kind))
    if entrusted:
        journal.entrust(id_, "alpha")
    before = journal.operation(id_)
    with pytest.raises(BadInput, match=says):
        await migration.resume(app_controller.Controller(inventory=NO_HOSTS, caller=NOBODY), id_)
    assert journal.operation(id_).controller == before.controller


OFF = replace(WEB, state=GuestState.SHUT_OFF)
LEAVES = replace(WEB, job=GuestJob.OUTGOING)


@pytest.mark.parametrize(
    ("found", "host"),
    [
        (ONE, "beta"),
        ([(HOSTS["alpha"], OFF), (HOSTS["beta"], WEB)], "beta"),
        ([(HOSTS["alpha"], OFF)], "alpha"),
        # Preflight says what it is busy with.
        ([(HOSTS["alpha"], LEAVES), (HOSTS["beta"], WEB)], "alpha"),
    ],
)
async def test_a_guest_is_moved_away_from_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, found: Found, host: str
) -> None:
    asked(monkeypatch, found, found)
    for name in (WEB.name, WEB.uuid):
        assert await migration._find(INVENTORY, name, "gamma") == HOSTS[host]


@pytest.mark.parametrize(
    ("found", "silent", "kind", "why"),
    [
        (TWO, {}, OutcomeUnknown, "web1 is running on alpha and beta"),
        ([], {}, BadInput, "no guest 'web1' on alpha, beta"),
        ([], {"beta": "no answer"}, HostUnreachable, "no answer from beta: no answer"),
        ([(HOSTS["alpha"], OFF)], {"beta": "no answer"}, HostUnreachable, "name the source"),
    ],
)
async def test_where_it_is_not_known_nothing_is_guessed(
    monkeypatch: pytest.MonkeyPatch, found: Found, silent: Mapping[str, str],
    kind: type[Exception], why: str,
) -> None:  # fmt: skip
    async def guests(_: Inventory) -> object:
        return found, silent

    monkeypatch.setattr(fleet, "guests", guests)
    with pytest.raises(kind, match=why):
        await migration._find(INVENTORY, "web1", "gamma")


@pytest.mark.parametrize("recovered", [False, True])
async def test_a_guest_is_searched_for_again_if_recovery_changed_anything(
    monkeypatch: pytest.MonkeyPatch, recovered: bool
) -> None:
    searches = []

    async def guests(_: Inventory) -> object:
        searches.append(recovered)
        if len(searches) == 1 and recovered:
            raise HostUnreachable("no answer", host="alpha")
        return ONE, {}

    async def recover(*_: object) -> bool:
        await asyncio.sleep(0.01)
        return recovered

    monkeypatch.setattr(fleet, "guests", guests)
    monkeypatch.setattr(recovery, "recover_before", recover)
    acting = app_controller.Controller(inventory=INVENTORY, caller=NOBODY)
    request = MigrateRequest(guest=WEB.name, to="alpha")

    setting = await migration._put_in_order_and_find(acting, request)

    assert setting.source == HOSTS["beta"]
    assert len(searches) == 1 + recovered


async def test_a_protected_guest_is_refused_before_its_host_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = []

    async def guests(_: Inventory) -> object:
        try:
            await asyncio.sleep(60.0)
            return [], {}
        finally:
            ended.append(True)

    def refuse(_: str) -> None:
        raise GuestLocked("guest web1 is protected")

    monkeypatch.setattr(fleet, "guests", guests)
    monkeypatch.setattr(jobs, "require_not_delegated", refuse)
    acting = app_controller.Controller(inventory=INVENTORY, caller=NOBODY)

    async with asyncio.timeout(10.0):
        with pytest.raises(GuestLocked, match="is protected"):
            await migration._put_in_order_and_find(acting, MigrateRequest(guest="web1", to="alpha"))
    assert ended


async def test_200_hosts_that_do_not_answer_are_one_short_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = {f"h{number:03}": f"h{number:03}: no route to host" for number in range(200)}

    async def guests(_: Inventory) -> object:
        return [], silent

    monkeypatch.setattr(fleet, "guests", guests)
    with pytest.raises(HostUnreachable) as caught:
        await migration._find(INVENTORY, "web1", "gamma")
    assert len(str(caught.value)) < 250
    assert "no answer from h000, h001, h002 and 197 more; h000: no route to host" in str(
        caught.value
    )
