"""A protection that is watched, listed or shown: its agents' words, while the journal has it."""

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vmckpt.app import controller
from vmckpt.cli import app as cli_app
from vmckpt.cli import output, watch_protection
from vmckpt.errors import InventoryError, OrphanedJobs
from vmckpt.inventory import Inventory
from vmckpt.journal import controller_identity
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.model.host import Host
from vmckpt.protection import agent_client
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.units import Seconds

WEB1 = NewOperation(kind="protect", guest="web1", guest_uuid="u-1", source="alpha", target="beta")
WORKS: dict[str, Any] = {
    "role": "primary", "phase": "protecting", "epoch": 7, "rpo_s": 0.12, "interval_s": 0.1,
    "interval_why": "as asked for: 100 ms", "median": {"pause_s": 0.02},
}  # fmt: skip
STANDS: dict[str, Any] = {"role": "backup", "runs": True, "ready": True, "says": "it follows"}

FULL: dict[str, Any] = {
    **WORKS, "rpo_worst_s": 0.5, "pause_p99_s": 0.03, "guest_clock_behind_s": 4.0,
    "output_delay_s": 0.085, "output_delay_worst_s": 0.31, "packets_lost": 0,
    "finder": "compare", "finder_why": "it works everywhere",
    "median": {"pause_s": 0.02, "pause_stop_s": 0.002, "busy_s": 0.01, "bytes": 2048, "pages": 3},
}  # fmt: skip

app = cli_app.app


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts:\n  alpha: {uri: 'qemu:///system'}\n  beta: {uri: 'qemu:///system'}\n")
    monkeypatch.setenv("VMCKPT_INVENTORY", str(hosts))
    monkeypatch.setattr(watch_protection, "_ASK_EVERY", Seconds(0.02))
    with Journal() as made:
        yield made


def protected(journal: Journal) -> str:
    """One that its agents go on with."""
    id_ = journal.begin(WEB1, asked_by="eve@desk")
    journal.update(id_, {"phase": "protecting"})
    journal.entrust(id_, "alpha")
    return id_


def agents(monkeypatch: pytest.MonkeyPatch, say: Callable[[int], tuple[Any, Any]]) -> None:
    """What they say, by how often they were asked before."""
    asked = iter(range(10**6))

    async def both(hosts: Mapping[str, Host], *_: object) -> dict[str, ProtectionStatus]:
        told = dict(zip(("alpha", "beta"), say(next(asked)), strict=True))
        return {name: parse_answer(told[name]) for name in hosts}

    monkeypatch.setattr(agent_client, "both", both)


def ran(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_it_is_watched_by_what_its_agents_say_until_the_guest_runs_on_the_backup(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected(journal)
    lines: list[str] = []
    monkeypatch.setattr(output, "say", lines.append)
    silent = {"error": "alpha: no answer", "unreachable": True}
    over = {**STANDS, "outcome": "failed-over", "why": "silent for 1.2 s"}
    agents(
        monkeypatch,
        lambda n: (WORKS, STANDS) if n < 4 else (silent, STANDS) if n < 8 else (silent, over),
    )

    told = ran("watch", "web1")

    assert len(lines) == 3
    assert (
        "protecting, epoch 7, 120 ms behind, pause 20 ms, interval 100 ms (as asked for: 100 ms),"
        " standby ready: it follows" in lines[0]
    )
    assert "unknown, standby ready: it follows, in the way: alpha: no answer" in lines[1]
    assert "the guest runs on beta: silent for 1.2 s" in told


def test_in_json_it_is_an_object_a_line_that_ends_with_what_the_journal_knows(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = protected(journal)

    def say(count: int) -> tuple[Any, Any]:
        if count == 5:
            journal.finish(id_, "completed", {"unprotected": True, "runs_on": "alpha"})
        return WORKS, STANDS

    agents(monkeypatch, say)
    first, last = [json.loads(line) for line in ran("watch", id_, "--json").splitlines()]

    assert (first["kind"], first["because"]) == ("stands", ["first"])
    assert (first["phase"], first["behind_s"], first["ready"]) == ("protecting", 0.12, True)
    assert (last["kind"], last["outcome"], last["job"]["job"]) == ("ended", "completed", id_)
    assert last["why"] == "it is not protected any more; the guest runs on alpha"


def test_while_somebody_is_at_work_with_it_its_agents_are_not_asked(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is taken away looks like one that is lost."""
    id_ = journal.begin(WEB1)
    journal.update(id_, {"phase": "protecting"})
    lines: list[str] = []
    left = iter(range(3))

    def say(line: str) -> None:
        lines.append(line)
        journal.finish(id_, "completed", {"failed_over": "beta", "why": "asked for"})

    monkeypatch.setattr(output, "say", say)
    agents(monkeypatch, lambda _: (next(left), {}))

    assert "the guest runs on beta: asked for" in ran("watch", "web1")
    assert [line.split()[-5:] for line in lines] == [["is", "at", "work", "with", "it"]]
    assert next(left) == 0


def test_one_whose_controller_died_before_it_was_ready_is_nobodys(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents(monkeypatch, lambda _: (WORKS, STANDS))
    journal.begin(WEB1, controller=replace(controller_identity.this_process(), started=1))

    with pytest.raises(OrphanedJobs, match="nobody attends"):
        ran("watch", "web1")


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
        "alpha is silent"
        if name == "alpha"
        else "the guest runs without it, and it can never take over"
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
    assert lines == ["protections are shown as the journal has them: no inventory"]
    assert "protection" not in json.loads(ran("jobs", "--json"))[0]


def test_an_inventory_that_was_named_must_be_one(journal: Journal) -> None:
    protected(journal)

    with pytest.raises(InventoryError):
        ran("jobs", "--inventory", "/nowhere/hosts.yaml")


def test_the_status_tells_what_output_waits_and_what_finds_changes(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected(journal)
    agents(monkeypatch, lambda _: (FULL, STANDS))

    rows = {line[:15].strip(): line[15:].strip() for line in ran("status").splitlines()}

    assert rows["standby"] == "ready: it follows"
    assert rows["behind (RPO)"] == "120 ms, worst 500 ms"
    assert rows["output waits"] == "85 ms, worst 310 ms"
    assert rows["changes by"] == "compare (it works everywhere)"
    (told,) = json.loads(ran("status", "--json"))
    assert told["standby"] == {"ready": True, "why": "it follows"}
    assert told["says"] == {"alpha": FULL, "beta": STANDS}


def test_the_status_of_a_guest_that_is_alone_says_why_and_nothing_about_a_lag(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected(journal)
    alone = {**FULL, "phase": "alone", "says": "no room is left", "packets_lost": 40}
    agents(monkeypatch, lambda _: (alone, STANDS))

    told = ran("status")

    assert "web1: alone, alpha → beta" in told
    assert "not ready: the guest runs without it, and it can never take over" in told
    assert "no room is left" in told
    assert "40 packets were too many for QEMU, and lost" in told
    assert "behind (RPO)" not in told
