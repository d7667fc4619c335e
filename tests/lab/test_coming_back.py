"""What goes with a guest that comes back: hooks outside, its links, its stored definition."""

import re
from pathlib import Path

import pytest

from tests.lab import guest_agents
from tests.lab.bench import Bench, until
from tests.lab.snapshots import SMALL, proofs, taken


def link(bench: Bench, on: str, name: str) -> str:
    """Whether a guest's cable is in, by its card."""
    listed = bench.inside(on, "virsh", "domiflist", name)
    (mac,) = re.findall(r"52:54:00[:0-9a-f]+", listed)
    return bench.inside(on, "virsh", "domif-getlink", name, mac).split()[-1]


def generation_id(bench: Bench, on: str, name: str) -> str:
    (found,) = re.findall(r"<genid>(.*)</genid>", bench.inside(on, "virsh", "dumpxml", name))
    return str(found)


def with_generation_id(bench: Bench) -> None:
    """Let the guest have a device that tells it when it was restored."""
    bench.inside("alpha", "virsh", "destroy", "web1")
    xml = bench.inside("alpha", "virsh", "dumpxml", "web1", "--inactive")
    file = bench.plan.shared / "genid.xml"
    file.write_text(xml.replace("</uuid>", "</uuid><genid/>"))
    bench.inside("alpha", "virsh", "define", str(file))
    file.unlink()
    heard = bench.seen().heard
    bench.inside("alpha", "virsh", "start", "web1")
    until(lambda: bench.seen().heard > heard + 5, limit=60)


@pytest.mark.long
def test_a_forks_network_comes_up_after_its_hook_and_only_then(
    kept: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest_agents.started(kept, tmp_path, monkeypatch, stays=True)
    with_generation_id(kept)
    one = taken(kept).json
    fork = ("snapshot", "restore", one["id"], "--as", "fork", "--on", "beta", "--link", "--json")
    told = Path(kept.plan.folder) / "hook"
    ids = {generation_id(kept, "alpha", "web1")}
    for hook, code, state in (("exit 9", 24, "down"), (f"env > {told}", 0, "up")):
        try:
            done = kept.run(*fork, "--on-restore", hook)
            assert done.code == code, done.err
            assert done.json["hook_status"] == (9 if code else 0)
            assert link(kept, "beta", "fork") == state
            assert "running" in kept.inside("beta", "virsh", "domstate", "fork")
            ids.add(generation_id(kept, "beta", "fork"))
        finally:
            kept.inside("beta", "virsh", "destroy", "fork")
            kept.inside("beta", "virsh", "undefine", "fork")
            for path in Path(kept.plan.shared).glob("fork-*"):
                path.unlink()
    said = told.read_text().splitlines()
    told.unlink()
    assert "VMCKPT_GUEST=fork" in said
    assert "VMCKPT_FORK=1" in said
    assert "VMCKPT_ORIGIN=web1" in said
    kept.good("snapshot", "restore", one["id"], "--replace")
    ids.add(generation_id(kept, "alpha", "web1"))
    assert len(ids) == 4, "each time that time goes back, the guest is told by a new id"


@pytest.mark.long
def test_a_definition_that_is_missing_or_old_is_put_right(kept: Bench) -> None:
    kept.guest(**SMALL)
    one = taken(kept).json
    kept.inside("alpha", "virsh", "destroy", "web1")
    kept.good("snapshot", "restore", one["id"], "--replace", "--on", "beta")
    stored = kept.inside("beta", "virsh", "dumpxml", "web1", "--inactive")
    assert "<memory unit='KiB'>196608</memory>" in stored
    kept.inside("beta", "virsh", "destroy", "web1")
    kept.inside("beta", "virsh", "undefine", "web1")

    kept.inside("alpha", "virsh", "setmaxmem", "web1", "256MiB", "--config")
    back = kept.good("snapshot", "restore", one["id"], "--replace", "--json").json
    assert any("differed (memory)" in text for text in back["warnings"]), back
    stored = kept.inside("alpha", "virsh", "dumpxml", "web1", "--inactive")
    assert "<memory unit='KiB'>196608</memory>" in stored
    assert proofs(kept) == []
    again = kept.good("snapshot", "restore", one["id"], "--replace", "--json").json
    assert not any("differed" in text for text in again["warnings"]), again
