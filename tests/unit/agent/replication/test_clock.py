"""A protected guest's clock is put right through an agent that answers."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import libvirt
import libvirt_qemu
import pytest

from tests.support import replicas
from vmckpt.agent.replication import clock as replication_clock
from vmckpt.agent.replication.clock import ClockKeeper
from vmckpt.hypervisor.guest_agent import GuestAgent
from vmckpt.replication.status import PrimaryStatus
from vmckpt.units import Seconds


class Guest:
    """A seat whose guest has an agent and a clock."""

    host = "alpha"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        self.told: list[dict[str, Any]] = []
        monkeypatch.setattr(libvirt_qemu, "qemuAgentCommand", self._command)

    def on_domain(
        self, what: str, call: Callable[[libvirt.virDomain], Any], *, changes: bool = False
    ) -> Any:
        del what, changes
        return call(cast("libvirt.virDomain", self))

    def _command(self, _: object, order: str, *__: object) -> str:
        told = json.loads(order)
        self.told.append(told)
        match told["execute"]:
            case "guest-get-time":
                return json.dumps({"return": round((time.time() + self.ahead) * 1e9)})
            case "guest-set-time":
                self.ahead = told["arguments"]["time"] / 1e9 - time.time()
            case _:
                pass
        return json.dumps({"return": {}})


def test_an_agent_sets_it_and_the_next_knows_what_is_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = Guest(monkeypatch)
    guest.ahead = 50.0
    status = PrimaryStatus()
    session = replicas.session()
    keeper = ClockKeeper(session, tmp_path, status)
    keeper._look(guest)
    guest.ahead = 48.5  # stood still
    status._paused = 1.5
    keeper._look(guest)
    assert guest.ahead == pytest.approx(50.0, abs=0.05)
    told = status.as_json()
    assert told["guest_clock_corrected"] == 1
    assert told["guest_clock_behind_s"] == pytest.approx(1.5, abs=0.05)
    assert status.note()["clock_ahead_s"] == pytest.approx(50.0, abs=0.05)

    guest.ahead, later = 49.5, PrimaryStatus()
    ClockKeeper(session, tmp_path, later)._look(guest)
    assert guest.ahead == pytest.approx(50.0, abs=0.05)
    assert later.as_json()["guest_clock_corrected"] == 2


def test_after_a_failover_it_is_set_by_the_new_host(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = Guest(monkeypatch)
    replication_clock.set_ahead(GuestAgent(guest), Seconds(-7.0))
    assert guest.ahead == pytest.approx(-7.0, abs=0.05)
    assert [one["execute"] for one in guest.told] == ["guest-set-time"]
