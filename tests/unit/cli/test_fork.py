"""vmckpt fork: which command a word is, what is printed, exit codes, and Ctrl-C."""

import io
import json
import os
import signal

import pytest

from tests.support.fork_agent import UUID, XML, ForkAgents, fork_agents
from tests.support.stocking import Stock, stock
from vmckpt.cli import app

__all__ = ["stock"]


@pytest.fixture
def agents(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> ForkAgents:
    return fork_agents(stock, monkeypatch)


@pytest.fixture
def forked(agents: ForkAgents, capsys: pytest.CaptureFixture[str]) -> "Forked":
    return Forked(capsys)


class Forked:
    """Runs commands of `vmckpt fork`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        code = app.run(["fork", *words])
        told = self._capsys.readouterr()
        return code, told.out, told.err


def test_create_may_be_omitted(forked: Forked, agents: ForkAgents) -> None:
    assert forked("web1", "--count", "2")[0] == 0
    assert forked("--name", "t", "web1")[0] == 0
    assert forked("create", "web1", "--on", "beta")[0] == 0
    assert agents.names() == ["web1-fork-1", "web1-fork-2", "t-1"]
    assert agents.names("beta") == ["web1-fork-1"]
    code, _, wrong = forked("create", "tree")  # a guest of this name
    assert (code, "no host has a guest 'tree'" in wrong) == (45, True)


def test_help_is_that_of_the_group_and_of_each_command(forked: Forked) -> None:
    assert "Start and manage families" in forked("--help")[1]
    assert "Start and manage families" in forked()[1]
    assert "--parallel" in forked("web1", "--help")[1]
    code, _, wrong = forked("web1", "--count", "0")
    assert (code, "see vmckpt fork create --help" in wrong) == (2, True)


def test_started_forks_are_in_a_table(forked: Forked, agents: ForkAgents) -> None:
    agents.fails = {"web1-fork-2": "no space"}
    code, out, wrong = forked("web1", "--count", "3")
    assert code == 10
    lines = out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["fork", "running", "after", "memory"],
        ["web1-fork-1", "250", "ms", "8.0", "KiB"],
        ["web1-fork-3", "250", "ms", "8.0", "KiB"],
    ]
    assert "2 forks of web1 on alpha" in lines[3]
    assert "warning: web1-fork-2 was not started: no space" in wrong
    assert "1 of 3 forks were not started: no space; run vmckpt doctor alpha" in wrong


def test_the_tree_shows_what_a_fork_does_not_share(forked: Forked, agents: ForkAgents) -> None:
    assert forked("tree")[1:] == ("", "no families\n")
    forked("web1", "--count", "2")
    agents.silent = {"beta": "no route"}
    code, out, wrong = forked("tree")
    (family,) = agents.families["alpha"]
    head, first, second = out.splitlines()[1:]
    assert code == 0
    assert head.split() == ["web1", family["snapshot"], "(near)", family["family"], "on", "alpha"]
    assert first.split() == ["├─", "web1-fork-1", "running", "3.0", "MiB", "1.0", "MiB"]
    assert second.split()[:2] == ["└─", "web1-fork-2"]
    assert "warning: beta: no route; its families are not shown" in wrong


def test_dropping_is_confirmed_first(
    forked: Forked, agents: ForkAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked("web1", "--count", "2")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, wrong = forked("drop", "web1-fork-1")
    assert (code, "destroy web1-fork-1, with all their changes: stdin is not" in wrong) == (2, True)
    assert agents.names() == ["web1-fork-1", "web1-fork-2"]
    code, out, _ = forked("drop", "web1-fork-1", "--yes")
    assert (code, out, agents.names()) == (0, "web1-fork-1 was dropped\n", ["web1-fork-2"])
    (family,) = agents.families["alpha"]
    code, out, _ = forked("drop", "--family", family["family"], "--yes")
    assert (code, f"{family['snapshot']} was deleted" in out, agents.names()) == (0, True, [])
    code, _, wrong = forked("drop", "web1-fork-2", "--yes")
    assert (code, "is not a fork of a family; nothing was changed" in wrong) == (2, True)
    assert forked("drop")[0] == 2


def test_the_snapshot_of_the_last_kept_fork_is_named(forked: Forked, agents: ForkAgents) -> None:
    forked("web1")
    (family,) = agents.families["alpha"]
    code, out, wrong = forked("keep", "web1-fork-1")
    assert (code, "web1-fork-1 on alpha is independent of fam-" in out) == (0, True)
    assert f"run vmckpt snapshot delete {family['snapshot']}" in wrong


def test_commands_are_shown_with_their_forks_and_decide(forked: Forked, agents: ForkAgents) -> None:
    command = "n={}; echo x >&2; echo ${n##*-}; test $n != web1-fork-3"
    code, out, _ = forked("web1", "--count", "3", "--parallel", "1", "--run", command)
    assert (code, agents.names()) == (0, ["web1-fork-2"])
    told = [line for line in out.splitlines() if line.startswith(("web1-fork-2: ", "    "))]
    assert told[0] == "    1"
    assert told[2].startswith("web1-fork-2: exit status 0 after ")
    assert told[2].endswith(", 2")
    assert told[3:5] == ["    2", "    x"]
    assert out.splitlines()[-2:] == ["best: web1-fork-2", "2 forks dropped"]


def test_the_exit_code_says_whether_a_command_succeeded(forked: Forked, agents: ForkAgents) -> None:
    code, _, wrong = forked("web1", "--count", "2", "--run", "exit 4")
    assert (code, "the command succeeded for no fork" in wrong, agents.names()) == (24, True, [])
    assert forked("web1", "--count", "2", "--run", "exit 4", "--keep", "all")[0] == 24
    assert agents.names() == ["web1-fork-1", "web1-fork-2"]
    code, _, wrong = forked("web1", "--keep", "all")
    assert (code, "only for --run; add --run CMD" in wrong) == (2, True)


def test_ctrl_c_ends_the_commands_and_drops_the_forks(
    forked: Forked, agents: ForkAgents, stock: Stock
) -> None:
    code, _, wrong = forked(
        "web1", "--count", "2", "--run", f"kill -{signal.SIGINT:d} {os.getpid()}; sleep 600"
    )
    assert (code, agents.names(), stock.store().manifests()) == (130, [], [])
    assert "stopping: the forks will be dropped" in wrong
    assert "stopped; the commands were ended, and 2 forks were dropped" in wrong


def test_json(forked: Forked, stock: Stock) -> None:
    stock.put("before", [1], domain_xml=XML, guest_uuid=UUID)
    done = json.loads(forked("before", "--count", "2", "--json")[1])
    assert ([one["name"] for one in done["forks"]], done["run"]) == (
        ["web1-fork-1", "web1-fork-2"], None,
    )  # fmt: skip
    ran = json.loads(forked("web1", "--name", "r", "--count", "2", "--run", "echo 5", "--json")[1])
    assert (ran["run"]["commands"][0]["score"], len(ran["run"]["kept"])) == (5, 1)
    (first, second) = json.loads(forked("tree", "--json")[1])["families"]
    assert {len(first["forks"]), len(second["forks"])} == {1, 2}
    kept = json.loads(forked("keep", "web1-fork-1", "--json")[1])
    assert (kept["kept"], kept["unused_snapshot"]) == ("web1-fork-1", None)
    gone = json.loads(forked("drop", "web1-fork-2", *ran["run"]["kept"], "--yes", "--json")[1])
    assert sorted(gone["dropped"]) == sorted(["web1-fork-2", *ran["run"]["kept"]])
    assert gone["deleted_snapshots"] == [ran["snapshot"]]
