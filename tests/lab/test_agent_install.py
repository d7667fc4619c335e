"""Hosts on which nothing of vmckpt is installed: the agent is brought there, and brought anew."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vmckpt
from tests.lab.bench import VMCKPT, WHOLE, Bench, Done, finish, traces, until
from tests.lab.protecting import GUEST, agent, left, ours
from vmckpt.remote import agent_install
from vmckpt_lab import guests, lab

CHECKOUT = Path(vmckpt.__file__).parents[1]
HOSTS = ("alpha", "beta")


@pytest.fixture
def bare() -> Iterator[Bench]:
    """A lab of its own, whose hosts see nothing of vmckpt."""
    name = f"i{os.getpid()}"
    bench = Bench(lab.up(name, hosts=2))
    for one in HOSTS:
        for folder in dict.fromkeys((str(CHECKOUT), sys.prefix)):
            bench.inside(one, "mkdir", "-p", folder)
            bench.inside(one, "mount", "-t", "tmpfs", "tmpfs", folder)
        told = bench.inside(one, "sh", "-c", f"command -v vmckpt-agent; ls {CHECKOUT}")
        assert told.strip() == ""
    yield bench
    bench.run("unprotect", "web1")
    for guest in guests.stored(bench.plan):
        guests.remove(bench.plan, guest.name)
    lab.down(name)
    assert traces(f"{name}/") + traces(f"{name}.") == []


def versions(bench: Bench, on: str) -> Path:
    return Path(f"{bench.inventory.host(on).agent_state}-versions")


def installed(bench: Bench, on: str, *, count: int, without: str = "") -> set[str]:
    """Wait until so many whole versions are on a host."""

    def done() -> bool:
        found = complete(bench, on)
        return len(found) == count and without not in found

    # On a host without a free core a command may give up waiting before its installer is done.
    until(done, limit=60.0)
    return complete(bench, on)


def complete(bench: Bench, on: str) -> set[str]:
    """The versions on a host, without what an installer that was given up on has left."""
    return {path.name for path in versions(bench, on).iterdir() if path.name[0] != "."}


def newer(bench: Bench, folder: Path, *args: str) -> Done:
    """Run a command of a controller that was changed a little."""
    if not folder.exists():
        shutil.copytree(CHECKOUT / "vmckpt", folder / "vmckpt")
        with (folder / "vmckpt/agent/replication/main.py").open("a") as file:
            file.write(f"# {folder.name}\n")
    process = subprocess.Popen(
        [*VMCKPT, *args], env={**bench.environment, "PYTHONPATH": str(folder)}, cwd=folder,
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return finish(process)


@pytest.mark.long
def test_a_protection_brings_its_agents_and_an_upgrade_ends_nothing(
    bare: Bench, tmp_path: Path
) -> None:
    bare.guest(**GUEST)
    words = ("protect", "web1", "--to", "beta", "--interval", "200ms", "--failover", "manual")
    done = bare.run(*words, "--json")
    assert done.code == 0, done.err
    for one in HOSTS:
        assert done.err.count(f"installing the agent on {one} (") == 1
        (first,) = installed(bare, one, count=1)
        assert agent_install.OURS in first
        words_of = Path(f"/proc/{agent(bare, one)}/cmdline").read_bytes().split(b"\0")
        assert words_of[0].decode() == f"{versions(bare, one)}/{first}/bin/python3"
    (first,) = installed(bare, "alpha", count=1)
    assert "installing" not in bare.good("status", "web1").err

    agents = {one: agent(bare, one) for one in HOSTS}
    for one in HOSTS:
        os.utime(versions(bare, one) / first / "used", (0, 0))
    told: list[str] = []

    def brought() -> bool:
        """Whether both hosts have it; a status that gives up on a busy host ends its installer."""
        done = newer(bare, tmp_path / "second", "status", "web1", "--json")
        assert done.code == 0, done.err
        told.append(done.err)
        return all(len(complete(bare, one)) == 2 for one in HOSTS)

    until(brought, limit=120.0)
    for one in HOSTS:
        assert f"installing the agent on {one} (" in "".join(told)
        assert (first in complete(bare, one), agent(bare, one)) == (True, agents[one])
    epoch = ours(bare)["epoch"]  # asked by the first version again
    until(lambda: ours(bare)["epoch"] > epoch)

    ended = newer(bare, tmp_path / "second", "unprotect", "web1")
    assert ended.code == 0, ended.err
    assert left(bare) == []
    for one in HOSTS:
        os.utime(versions(bare, one) / first / "used", (0, 0))
    again = newer(bare, tmp_path / "third", "protect", "web1", "--to", "beta", "--failover",
                  "manual")  # fmt: skip
    assert again.code == 0, again.err
    for one in HOSTS:
        assert first not in installed(bare, one, count=2, without=first)
    done = newer(bare, tmp_path / "third", "unprotect", "web1")
    assert done.code == 0, done.err
    assert bare.ledgers() == WHOLE


@pytest.mark.long
def test_a_snapshot_is_taken_of_a_host_without_vmckpt(bare: Bench) -> None:
    bare.guest(memory="160MiB", dirty="32MiB@10MiB/s", disk="32MiB")
    bare.good("snapshot", "init")

    done = bare.good("snapshot", "create", "web1")

    assert "installing the agent on alpha (" in done.err
    assert bare.ledgers() == WHOLE
