"""Protections in the list of jobs: how far they are behind, by their agents' words."""

import json
import socket
from pathlib import Path

import pytest

from tests.support.protected_jobs import STANDS, WORKS, agents, journal, protected
from tests.support.recorded_jobs import ran
from vmckpt.app import controller
from vmckpt.cli import output
from vmckpt.errors import InventoryError
from vmckpt.inventory import Inventory
from vmckpt.journal.store import Journal

__all__ = ["journal"]


def test_a_list_of_jobs_shows_how_far_a_standby_is_behind(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected(journal)
    agents(monkeypatch, lambda _: (WORKS, STANDS))

    assert "120 ms behind" in ran("jobs")
    (told,) = json.loads(ran("jobs", "--json"))
    assert (told["protection"]["phase"], told["protection"]["behind_s"]) == ("protecting", 0.12)
    agents(monkeypatch, lambda _: ({**WORKS, "phase": "alone"}, STANDS))
    assert " alone " in ran("jobs")


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_host_that_takes_no_calls_is_not_waited_for(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    protected(journal)
    agents(monkeypatch, lambda _: ({**WORKS, "phase": "alone"}, STANDS))
    hosts = {
        one: {"uri": "qemu:///system"}
        | ({"ssh": {"address": "127.0.0.1", "port": 9}} if one == name else {})
        for one in ("alpha", "beta")
    }
    (tmp_path / "hosts.yaml").write_text(json.dumps({"hosts": hosts}))

    assert ("alpha silent" if name == "alpha" else "alone") in ran("jobs")
    told = json.loads(ran("jobs", "--json"))[0]["protection"]
    assert told["in_the_way" if name == "alpha" else "ready_why"] == (
        "alpha does not answer"
        if name == "alpha"
        else "the guest is running unprotected, so its standby is outdated"
    )


def test_a_host_that_takes_calls_is_asked(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    protected(journal)
    agents(monkeypatch, lambda _: (WORKS, STANDS))
    with socket.create_server(("127.0.0.1", 0)) as server:
        ssh = {"address": "127.0.0.1", "port": server.getsockname()[1]}
        hosts = {name: {"uri": "qemu:///system", "ssh": ssh} for name in ("alpha", "beta")}
        (tmp_path / "hosts.yaml").write_text(json.dumps({"hosts": hosts}))

        assert "120 ms behind" in ran("jobs")


def test_one_of_hosts_that_nobody_knows_here_is_as_the_journal_has_it(
    journal: Journal, tmp_path: Path
) -> None:
    protected(journal)
    (tmp_path / "hosts.yaml").write_text("hosts:\n  gamma: {uri: 'qemu:///system'}\n")

    assert " protecting " in ran("jobs")


def test_without_an_inventory_the_journal_is_what_there_is(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected(journal)

    def none(_: Path | None = None) -> Inventory:
        raise InventoryError("no inventory")

    lines: list[str] = []
    monkeypatch.setattr(output, "say", lines.append)
    monkeypatch.setattr(controller, "load_inventory", none)
    assert "protecting" in ran("jobs")
    assert lines == ["warning: showing protections from the journal only: no inventory"]
    assert "protection" not in json.loads(ran("jobs", "--json"))[0]


def test_an_inventory_that_was_named_must_be_one(journal: Journal) -> None:
    protected(journal)

    with pytest.raises(InventoryError):
        ran("jobs", "--inventory", "/nowhere/hosts.yaml")
