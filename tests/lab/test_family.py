"""A family of forks: what they cost, and what happens when they, or their server, end."""

import time

import pytest

from tests.lab.bench import Bench, until
from tests.lab.snapshots import proofs, taken

GUEST = {"memory": "192MiB", "dirty": "2MiB@1MiB/s", "disk": "32MiB"}
SERVER = "pgrep -f 'vmckpt[.]agent[.]main$'"


def tree(bench: Bench) -> list[dict[str, object]]:
    return list(bench.good("fork", "tree", "--json").json["families"])


def running(bench: Bench) -> set[str]:
    return set(bench.inside("alpha", "virsh", "list", "--name").split())


def lives(bench: Bench, name: str) -> bool:
    """Whether the fork's CPU time grows."""

    def used() -> int:
        told = bench.inside("alpha", "virsh", "domstats", name, "--cpu-total")
        return next(int(one.split("=")[1]) for one in told.split() if one.startswith("cpu.time"))

    before = used()
    time.sleep(1.0)
    return used() > before


@pytest.mark.long
def test_forks_share_what_they_do_not_touch_and_leave_nothing(kept: Bench) -> None:
    kept.guest(**GUEST)
    one = taken(kept).json["id"]
    made = kept.good("fork", one, "--count", "3", "--name", "try", "--json").json
    names = [child["name"] for child in made["forks"]]
    assert names == ["try-1", "try-2", "try-3"]
    assert running(kept) == {"web1", *names}
    assert all(lives(kept, name) for name in names)
    (family,) = tree(kept)
    children = family["forks"]
    assert isinstance(children, list)
    assert all(child["memory_bytes"] < 16 << 20 for child in children)
    assert all(child["disk_bytes"] < 8 << 20 for child in children)
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}
    refused = kept.run("snapshot", "delete", one, "--yes")
    assert refused.code != 0
    assert "pinned" in refused.err

    kept.inside("alpha", "sh", "-c", f"kill -9 $({SERVER})")
    until(lambda: all(lives(kept, name) for name in names))  # the guard starts another server

    kept.good("fork", "keep", "try-2")
    assert kept.inside("alpha", "virsh", "dominfo", "try-2").count("Persistent:     yes")
    assert "nbd" not in kept.inside("alpha", "virsh", "dumpxml", "try-2")
    kept.good("fork", "drop", "try-1", "--yes")
    kept.inside("alpha", "virsh", "destroy", "try-3")  # not by vmckpt
    until(lambda: tree(kept) == [])
    until(lambda: "family" not in kept.inside("alpha", "sh", "-c", "ls /run/vmckpt"))
    assert running(kept) == {"web1", "try-2"}
    assert lives(kept, "try-2")
    assert proofs(kept, "web1") == []
    images = {path.name for path in kept.plan.shared.glob("try-*")}
    assert images == {"try-2-vda.qcow2"}
    until(lambda: not kept.good("snapshot", "list", "--json").json[0]["pinned"])


@pytest.mark.long
def test_the_best_of_several_commands_is_kept(kept: Bench) -> None:
    kept.guest(**GUEST)
    command = "test {} != best-2 && echo {} | tr -dc 0-9"
    done = kept.good("fork", "web1", "--count", "3", "--name", "best", "--run", command, "--json")
    assert done.json["run"]["best"] == "best-3"
    until(lambda: running(kept) == {"web1", "best-3"})
    kept.good("fork", "drop", "best-3", "--yes")
    until(lambda: running(kept) == {"web1"})
    assert kept.good("snapshot", "list", "--json").json == []
