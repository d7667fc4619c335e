"""The guest agent's protocol, through libvirt and a virtio-serial port, to one in a guest."""

import threading
import time
from pathlib import Path

import pytest

from tests.lab.bench import WHOLE, Bench, until, uuid
from tests.lab.guest_agents import started
from vmckpt.capture.fs_freeze import FsFreeze, FsFreezeUndo
from vmckpt.hypervisor import qmp
from vmckpt.hypervisor.guest_agent import GuestAgent, thaw_left
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.units import Seconds


def still(bench: Bench) -> bool:
    """Whether it writes nothing for a while; what it had written has been heard by then."""
    before = bench.seen().highest
    time.sleep(0.3)
    return bench.seen().highest == before


def goes_on(bench: Bench) -> None:
    """Wait until it has written something."""
    before = bench.seen().highest
    until(lambda: bench.seen().highest > before)


@pytest.mark.long
def test_a_guest_is_held_still_and_always_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(bench, tmp_path, monkeypatch)
    notes: list[FsFreezeUndo] = []
    with QmpMonitor(uuid(bench), host="alpha", uri=bench.inventory.host("alpha").uri) as monitor:
        agent = GuestAgent(monitor)
        until(agent.there)
        known = uuid(bench)
        with FsFreeze(agent, guest=known, limit=Seconds(20.0), note=notes.append) as quiet:
            assert agent.frozen()
            assert still(bench)
            assert quiet.release()
            assert not agent.frozen()
        assert quiet.finding("web1") is None
        goes_on(bench)

        with FsFreeze(agent, guest=known, limit=Seconds(1.0), note=notes.append) as quiet:
            until(lambda: not quiet.held)
            until(lambda: not agent.frozen())
        finding = quiet.finding("web1")
        assert finding is not None
        assert finding.code == "thawed-early"

        agent.freeze(limit=Seconds(5.0))  # and killed
        assert still(bench)
        thawed = bench.ask(
            "alpha",
            lambda hypervisor: qmp.call_on_domain(
                hypervisor, notes[0].guest, "thawing",
                lambda there: thaw_left(GuestAgent(there)), changes=True,
            ),
        )  # fmt: skip
        assert thawed
        goes_on(bench)
        assert not thaw_left(agent)
    assert [t for t in threading.enumerate() if t.name == "thaw"] == []
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_freeze_that_comes_too_late_is_undone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(bench, tmp_path, monkeypatch, slow=3.0)
    with QmpMonitor(uuid(bench), host="alpha", uri=bench.inventory.host("alpha").uri) as monitor:
        agent = GuestAgent(monitor)
        until(agent.there)
        with FsFreeze(
            agent, guest=uuid(bench), limit=Seconds(1.0), note=lambda _: None
        ) as quiet:  # fmt: skip
            assert not quiet.held
        finding = quiet.finding("web1")
        assert finding is not None
        assert finding.code in ("not-frozen", "thawed-early")
        time.sleep(3.0)  # the freeze comes now, and is undone
        until(lambda: not agent.frozen())
        goes_on(bench)
    assert bench.ledgers() == WHOLE
