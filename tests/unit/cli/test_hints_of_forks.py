"""The hints about forks, typed as they are printed."""

from dataclasses import replace

import pytest

from tests.support.following import take, words
from tests.support.fork_agent import UUID, WEB1, XML, ForkAgents, fork_agents
from tests.support.restored import RESTORED
from tests.support.stocking import Stock, stock
from vmckpt.app import forks, snapshot_restore
from vmckpt.cli import app
from vmckpt.journal import controller_identity
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.model.guest import GuestState
from vmckpt.snapshot.request import Step
from vmckpt.store.format.metadata import Contents

__all__ = ["stock"]


@pytest.fixture
def agents(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> ForkAgents:
    return fork_agents(stock, monkeypatch)


def printed(stock: Stock, *line: str, code: int = 0) -> str:
    """What a command prints, on stdout and stderr."""
    assert app.run(list(line)) == code
    told = stock.capsys.readouterr()
    return told.out + told.err


def without_beta(stock: Stock) -> None:
    """libvirt's test driver has one guest, which would be on both hosts."""
    path = stock.folder / "hosts.yaml"
    path.write_text(path.read_text().replace(", beta: {uri: 'test:///default'}", ""))


def the_line(text: str, part: str) -> str:
    (line,) = [one for one in text.splitlines() if part in one]
    return line


def test_a_snapshot_that_stayed_pinned_is_deleted(
    agents: ForkAgents, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents.lasts = True
    monkeypatch.setattr(forks, "_RELEASED_IN", 0.0)
    assert app.run(["fork", "web1"]) == 0
    told = printed(stock, "fork", "drop", "web1-fork-1", "--yes")
    (id_,) = [one.id for one in stock.store().manifests()]
    stock.store().unpin(id_)
    typed = words(the_line(told, "was not deleted"))
    assert app.run([*typed[1:], "--yes"]) == 0
    assert stock.store().manifests() == []


def test_forks_that_were_not_dropped_are_dropped_later(agents: ForkAgents, stock: Stock) -> None:
    line = ("fork", "web1", "--count", "2", "--run", f"touch {stock.folder}/ran; exit 1")
    gone = {"alpha": "no route"}

    class Gone(dict[str, str]):
        """alpha is away once a command has run."""

        def __contains__(self, name: object) -> bool:
            return name in gone and (stock.folder / "ran").exists()

    agents.silent = Gone(gone)
    told = printed(stock, *line, code=12)
    agents.silent = {}
    assert app.run([*words(the_line(told, "not all forks"))[1:], "--yes"]) == 0
    assert agents.names() == []


def test_what_can_be_forked_is_listed(agents: ForkAgents, stock: Stock) -> None:
    without_beta(stock)
    told = printed(stock, "fork", "nothing", code=45)
    assert agents.names() == []
    for one in take(told):
        assert app.run(list(one.words[1:])) == 0


def test_a_snapshot_of_a_guest_that_is_off_is_forked(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = fork_agents(stock, monkeypatch, replace(WEB1, state=GuestState.SHUT_OFF))
    id_ = stock.put("before", [1], domain_xml=XML, guest_uuid=UUID)
    told = printed(stock, "fork", "web1", code=2)
    assert id_ in printed(stock, *words(told)[1:])
    assert app.run(["fork", id_]) == 0
    assert agents.names() == ["web1-fork-1"]


def test_the_snapshot_of_forks_that_were_all_kept_is_deleted(
    agents: ForkAgents, stock: Stock
) -> None:
    assert app.run(["fork", "web1"]) == 0
    told = printed(stock, "fork", "keep", "web1-fork-1")
    assert agents.kept
    assert app.run([*words(the_line(told, "no fork uses"))[1:], "--yes"]) == 0
    assert stock.store().manifests() == []


def test_the_tree_names_the_forks(agents: ForkAgents, stock: Stock) -> None:
    assert app.run(["fork", "web1"]) == 0
    told = printed(stock, "fork", "drop", "zz", "--yes", code=2)
    assert agents.names()[0] in printed(stock, *words(told)[1:])


def test_disks_without_memory_are_restored_as_one_guest(
    agents: ForkAgents, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def restored(_: object, __: object, request: object, **___: object) -> object:
        asked.append(request)
        return RESTORED

    monkeypatch.setattr(snapshot_restore, "restore", restored)
    id_ = stock.put("disks", [1], domain_xml=XML, guest_uuid=UUID, contents=Contents.DISKS)
    told = printed(stock, "fork", id_, code=2)
    assert app.run(words(told, NAME="twin")[1:]) == 0
    (request,) = asked
    assert (request.snapshot, request.fork) == (id_, "twin")  # type: ignore[attr-defined]
    assert agents.ordered == []


def test_forks_of_a_command_that_was_killed_are_dropped(agents: ForkAgents, stock: Stock) -> None:
    assert app.run(["fork", "web1", "--count", "2"]) == 0
    (family,) = agents.families["alpha"]
    gone = replace(controller_identity.this_process(), started=1)
    with Journal() as journal:
        new = NewOperation(kind="fork", guest="web1", source="alpha")
        id_ = journal.begin(new, controller=gone)
        intent = {"family": family["family"], "guests": ["u-1", "u-2"]}
        journal.intend(id_, Step.FORK, intent, None, by=gone)
    stock.capsys.readouterr()
    without_beta(stock)
    told = printed(stock, "recover")
    assert app.run([*words(the_line(told, "keep the forks"))[1:], "--yes"]) == 0
    assert agents.names() == []
