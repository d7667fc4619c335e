"""Memory that is plugged into a guest, and out of it, while it is protected or has snapshots."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.lab.bench import WHOLE, Bench, until
from tests.lab.growing import GUEST, dimms, goes_right, growing, plug
from tests.lab.protecting import (
    SOON,
    agent,
    asked,
    epochs,
    lab_with_witness,
    left,
    on_qemu,
    protect,
    tidied,
)
from tests.lab.snapshots import proofs, taken
from vmckpt_lab import host

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"m{os.getpid()}") as made:
        yield made


@pytest.fixture
def pair(witnessed: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with growing(witnessed.plan, monkeypatch), tidied(witnessed) as bench:
        yield bench


@pytest.fixture
def grown(kept: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with growing(kept.plan, monkeypatch):
        yield kept


@pytest.mark.parametrize("finder", ["write-tracking", "compare"])
def test_memory_that_is_plugged_in_is_protected_and_survives_the_host(
    pair: Bench, finder: str
) -> None:
    pair.guest(**GUEST, boot=True, shared_memory=finder == "compare")
    protect(pair, "--finder", finder)
    epochs(pair)
    first = asked(pair)
    plug(pair)
    until(lambda: dimms(pair, "beta") == ["dimm0"], limit=SOON)
    epochs(pair)
    assert asked(pair)["phase"] == "protecting"
    assert asked(pair)["process"] == first["process"]
    assert asked(pair)["protected_for_s"] > first["protected_for_s"]
    goes_right(pair, "alpha")

    # Another agent, and more memory while there is none.
    os.kill(agent(pair, "alpha"), signal.SIGKILL)
    plug(pair, slot=1)
    until(lambda: dimms(pair, "beta") == ["dimm0", "dimm1"], limit=SOON)
    epochs(pair)
    until(lambda: asked(pair).get("phase") == "protecting", limit=SOON)

    # A copy of the standby has all of it.
    told = pair.good("failover", "web1", "--test", "--json").json
    assert dimms(pair, "beta", told["name"]) == ["dimm0", "dimm1"]
    pair.good("failover", "web1", "--end-test")
    epochs(pair)

    goes_right(pair, "alpha")
    host.power_off(pair.plan.host("alpha"))
    until(lambda: pair.where() == ["beta"], limit=2 * SOON)
    goes_right(pair, "beta")
    assert dimms(pair, "beta") == ["dimm0", "dimm1"]
    assert pair.ledgers() == WHOLE


def test_memory_that_is_unplugged_ends_the_protection_and_spoils_nothing(pair: Bench) -> None:
    pair.guest(**GUEST, boot=True)
    plug(pair)
    protect(pair)
    epochs(pair)
    plug(pair, slot=1)
    until(lambda: dimms(pair, "beta") == ["dimm0", "dimm1"], limit=SOON)
    epochs(pair)
    process = asked(pair)["process"]

    def unplugged() -> bool:
        """The guest may refuse for a while."""
        if "dimm1" in dimms(pair, "alpha"):
            with suppress(subprocess.CalledProcessError):
                plug(pair, "detach-device", slot=1)
        return dimms(pair, "alpha") == ["dimm0"]

    until(unplugged, limit=4 * SOON)
    until(lambda: asked(pair).get("phase") == "alone", limit=SOON)
    assert "plugged or unplugged" in asked(pair)["says"]
    assert asked(pair)["process"] == process
    pair.good("unprotect", "web1")
    assert left(pair) == []
    assert on_qemu(pair, "alpha") == []
    protect(pair)
    epochs(pair)
    pair.good("failover", "web1", "--planned")
    assert pair.where() == ["beta"]
    assert dimms(pair, "beta") == ["dimm0"]
    goes_right(pair, "beta")
    assert pair.ledgers() == WHOLE


def test_a_snapshot_after_memory_was_plugged_in_has_it(grown: Bench) -> None:
    grown.guest(**GUEST, boot=True)
    first = taken(grown).json
    assert first["way"] == "tracking", first
    plug(grown)
    goes_right(grown, "alpha")
    second = taken(grown).json
    assert second["way_reason"] == (
        "reads all memory: the layout of the guest's memory has changed"
    )
    assert second["read_bytes"] > first["read_bytes"] + (80 << 20)
    third = taken(grown).json
    assert third["way_reason"] == "reads what was written since the last snapshot"
    assert (second["warnings"], third["warnings"]) == ([], [])
    for one in (third, second):
        grown.good("snapshot", "restore", one["id"], "--replace")
        assert dimms(grown, "alpha") == ["dimm0"]
        goes_right(grown, "alpha")
        assert proofs(grown) == []
    grown.good("snapshot", "restore", first["id"], "--replace")
    assert dimms(grown, "alpha") == []
    assert proofs(grown) == []
