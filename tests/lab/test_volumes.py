"""A disk that is a volume of a storage pool, in moves, restores, forks and protections."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.bench import Bench, until
from tests.lab.pools import shared_pool
from tests.lab.snapshots import SMALL, proofs, taken


@pytest.fixture
def pool(kept: Bench) -> Iterator[str]:
    with shared_pool(kept, "volumes") as made:
        yield made


def with_volume(bench: Bench, pool: str, **wishes: str) -> None:
    """Start web1, and let its disk be a volume."""
    path = Path(bench.guest(**{**SMALL, **wishes}).disk_path)
    bench.inside("alpha", "virsh", "destroy", "web1")
    xml = bench.inside("alpha", "virsh", "dumpxml", "web1", "--inactive")
    named = xml.replace("<disk type='file'", "<disk type='volume'").replace(
        f"<source file='{path}'", f"<source pool='{pool}' volume='{path.name}'"
    )
    assert "<disk type='volume'" in named
    described = bench.plan.shared / "web1.xml"
    described.write_text(named)
    for at in ("alpha", "beta"):
        bench.inside(at, "virsh", "pool-refresh", pool)
    heard = bench.seen().heard
    bench.inside("alpha", "virsh", "define", str(described))
    bench.inside("alpha", "virsh", "start", "web1")
    described.unlink()
    until(lambda: bench.seen().heard > heard + 5, limit=60)


@pytest.mark.long
def test_the_guest_moves_and_its_snapshots_are_restored_and_forked(kept: Bench, pool: str) -> None:
    with_volume(kept, pool, disk_format="qcow2")
    first = taken(kept).json
    assert [one for one in first["warnings"] if "restore" in one] == []
    second = taken(kept).json
    assert second["read_bytes"] < first["read_bytes"]
    planned = kept.good("migrate", "web1", "--to", "beta", "--dry-run", "--json").json
    assert [one["code"] for one in planned["findings"] if one["code"].startswith("storage")] == []
    kept.good("migrate", "web1", "--to", "beta")

    kept.good("snapshot", "restore", first["id"], "--replace", "--on", "beta")
    assert kept.where() == ["beta"]
    assert proofs(kept) == []
    stored = kept.inside("beta", "virsh", "dumpxml", "web1", "--inactive")
    assert f"<source pool='{pool}'" in stored
    kept.inside("beta", "virsh", "destroy", "web1")
    kept.inside("beta", "virsh", "start", "web1")
    kept.good("snapshot", "restore", second["id"], "--as", "fork", "--on", "beta")
    try:
        xml = kept.inside("beta", "virsh", "dumpxml", "fork")
        assert f"file='{kept.plan.shared}/fork-vda" in xml
    finally:
        for words in (("destroy", "fork"), ("undefine", "fork")):
            kept.inside("beta", "virsh", *words)


@pytest.mark.long
def test_the_guest_is_protected_and_fails_over(kept: Bench, pool: str) -> None:
    with_volume(kept, pool)
    kept.good("protect", "web1", "--to", "beta")
    kept.good("failover", "web1", "--planned")
    assert kept.where() == ["beta"]
    assert proofs(kept) == []
