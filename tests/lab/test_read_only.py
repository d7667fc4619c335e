"""People who may look and not touch, on real hosts."""

import pytest

from tests.lab.bench import Bench

LOOKS: tuple[tuple[str, ...], ...] = (
    ("hosts",),
    ("guests",),
    ("doctor",),
    ("plan", "web1", "--to", "alpha", "--probe", "off"),
    ("migrate", "web1", "--to", "alpha", "--dry-run"),
    ("recover", "--dry-run"),
    ("jobs", "--all"),
    ("policy", "explain", "web1"),
)
ACTS: tuple[tuple[str, ...], ...] = (
    ("migrate", "web1", "--to", "alpha"),
    ("recover",),
    ("recover", "--forget", "web1"),
    ("resume", "web1"),
    ("label", "web1", "tier=db"),
)


@pytest.mark.long
def test_who_may_only_look_sees_all_and_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.guest()
    bench.good("migrate", "web1", "--to", "beta", "--probe", "off")
    with monkeypatch.context() as changed:  # what cleans up behind us may act
        changed.setenv("VMCKPT_READ_ONLY", "1")
        for args in LOOKS:
            done = bench.run(*args)
            assert done.code in (0, 21), (args, done.err)  # doctor may find something
            assert "read-only" not in done.err + done.out
        for args in ACTS:
            assert bench.run(*args).code == 5, args

    assert bench.where() == ["beta"]


def test_an_inventory_may_say_so_too(bench: Bench) -> None:
    bench.guest()
    path = bench.plan.folder / "viewers.yaml"
    path.write_text(bench.plan.inventory.read_text() + "read_only: true\n")
    looked = bench.run("guests", "--inventory", str(path))
    acted = bench.run("migrate", "web1", "--to", "beta", "--inventory", str(path))
    path.unlink()

    assert (looked.code, acted.code) == (0, 5)
    assert "viewers.yaml has read_only: true" in acted.err
    assert bench.where() == ["alpha"]
