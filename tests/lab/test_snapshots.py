"""Snapshots as an operator takes and restores them, on real hosts."""

import signal
from pathlib import Path

import pytest

from tests.lab.bench import Bench, finish, first_line, until
from tests.lab.snapshots import SMALL, ids, left, proofs, taken
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.format.manifest import decode
from vmckpt.store.repository import Store


def lines(bench: Bench) -> list[tuple[str, Path]]:
    """The lines of snapshots that hosts have."""
    return [(one.name, path) for one in bench.plan.hosts for path in one.root.glob("agent/lines/*")]


def test_there_and_back_again(kept: Bench) -> None:
    kept.guest(**SMALL)
    first = taken(kept, "--name", "first").json
    until(lambda: kept.seen().heard > 20)
    second = taken(kept).json
    assert second["written_bytes"] < 0.3 * first["written_bytes"]
    assert second["same_bytes"] > 0.5 * first["read_bytes"]
    assert ids(kept) == [first["id"], second["id"]]
    assert proofs(kept) == []

    refused = kept.run("snapshot", "restore", first["id"])
    assert refused.code == 18
    assert "use --replace" in refused.err
    back = kept.good("snapshot", "restore", first["id"], "--replace", "--json").json
    assert kept.where() == ["alpha"]
    assert proofs(kept) == []
    assert back["images"].keys() == {"vda"}
    assert left(kept) == []
    third = taken(kept).json
    assert third["same_bytes"] > 0


def test_a_fork_is_another_guest(kept: Bench) -> None:
    kept.guest(**SMALL)
    one = taken(kept).json
    kept.good("snapshot", "restore", one["id"], "--as", "fork", "--on", "beta")
    try:
        assert kept.inside("beta", "virsh", "list", "--name").split() == ["fork"]
        again = kept.run("snapshot", "restore", one["id"], "--as", "fork", "--on", "beta")
        assert (again.code, "already has a guest fork" in again.err) == (2, True)
        assert "<link state='down'/>" in kept.inside("beta", "virsh", "dumpxml", "fork")
    finally:
        kept.inside("beta", "virsh", "destroy", "fork")
        kept.inside("beta", "virsh", "undefine", "fork")
    assert kept.where() == ["alpha"]
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}


@pytest.mark.long
def test_a_paused_guest_stays_paused(kept: Bench) -> None:
    kept.guest(**SMALL)
    kept.inside("alpha", "virsh", "suspend", "web1")
    taken(kept)
    assert "paused" in kept.inside("alpha", "virsh", "domstate", "web1")
    kept.inside("alpha", "virsh", "resume", "web1")
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}


@pytest.mark.long
def test_ctrl_c_leaves_nothing(kept: Bench) -> None:
    kept.guest(**{**SMALL, "memory": "512MiB"})
    taking = kept.start("snapshot", "create", "web1")
    first_line(taking, "capture")
    taking.send_signal(signal.SIGINT)
    done = finish(taking)
    assert done.code == 130, done.err
    assert (ids(kept), left(kept)) == ([], [])
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}
    taken(kept)


@pytest.mark.parametrize("word", ["capture", pytest.param("store", marks=pytest.mark.long)])
def test_a_killed_controller_is_recovered(kept: Bench, word: str) -> None:
    kept.guest(**{**SMALL, "memory": "512MiB", "dirty": "300MiB@20MiB/s"})
    taking = kept.start("snapshot", "create", "web1")
    first_line(taking, word)
    taking.kill()
    finish(taking)
    assert kept.run("snapshot", "create", "web1").code == 18
    done = kept.good("recover", "--json").json
    assert [one["outcome"] for one in done] == ["completed" if ids(kept) else "failed"]
    assert left(kept) == []
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}
    kept.good("migrate", "web1", "--to", "beta")


@pytest.mark.long
def test_manifests_are_signed_by_the_controller(kept: Bench) -> None:
    kept.guest(**SMALL)
    one = taken(kept).json
    store = Store.open(backend_of(str(Path(kept.plan.shared) / "snapshots")))
    found = decode(store.manifest(one["id"]), one["id"], None)
    assert found.public.guest == "web1"
    assert [row["trusted"] for row in kept.good("snapshot", "list", "--json").json] == [True]


@pytest.mark.long
def test_a_line_goes_along_when_its_guest_moves(kept: Bench) -> None:
    kept.guest(**SMALL)
    first = taken(kept).json
    kept.good("migrate", "web1", "--to", "beta")
    second = taken(kept).json
    assert second["host"] == "beta"
    assert second["warnings"] == []
    assert second["same_bytes"] > 0.5 * first["read_bytes"]
    assert second["written_bytes"] < 0.5 * first["written_bytes"]
    assert [host for host, _ in lines(kept)] == ["beta"]
    kept.good("migrate", "web1", "--to", "alpha")
    [(_, line)] = lines(kept)
    (line / "chunks").write_bytes(b"")
    third = taken(kept).json
    assert "taken on beta" in third["warnings"][0]
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}
