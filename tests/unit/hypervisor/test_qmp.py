"""A libvirtd that is restarted while we talk with a guest's QEMU."""

import json
from typing import Any

import libvirt
import libvirt_qemu
import pytest

from vmckpt.errors import HostUnreachable, OutcomeUnknown
from vmckpt.hypervisor import connection, qmp
from vmckpt.hypervisor.qmp import QmpMonitor


class Connection:
    """One of several to the same libvirt, one after the other."""

    def __init__(self, story: list[str]) -> None:
        self.alive = True
        self.story = story
        """What becomes of each call: "ok", or it breaks."""

    def isAlive(self) -> int:
        return int(self.alive)

    def close(self) -> None:
        self.alive = False

    def lookupByUUIDString(self, _: str) -> "Connection":
        return self

    def isActive(self) -> int:
        return 1


class Libvirt:
    """Opens connections; `down`: how often it refuses from the second one on."""

    def __init__(self, *story: str, down: int = 0) -> None:
        self.story, self.down = list(story), down
        self.opened: list[Connection] = []
        self.asked: list[str] = []

    def open(self, _: str) -> Connection:
        if self.opened and self.down > 0:
            self.down -= 1
            raise libvirt.libvirtError("Connection refused")
        self.opened.append(Connection(self.story))
        return self.opened[-1]

    def command(self, domain: Connection, text: str, _: int) -> str:
        self.asked.append(json.loads(text)["execute"])
        if not domain.alive or self.story.pop(0) != "ok":
            domain.alive = False
            raise libvirt.libvirtError("End of file while reading data")
        return json.dumps({"return": {"status": "running"}})


def started(monkeypatch: pytest.MonkeyPatch, there: Libvirt) -> QmpMonitor:
    monkeypatch.setattr(connection, "start", lambda: None)
    monkeypatch.setattr(libvirt, "open", there.open)
    monkeypatch.setattr(libvirt_qemu, "qemuMonitorCommand", there.command)
    monkeypatch.setattr(qmp, "_TURN", 0.01)
    return QmpMonitor("u", host="alpha")


@pytest.mark.parametrize("down", [0, 3])
def test_what_changes_nothing_is_asked_again(monkeypatch: pytest.MonkeyPatch, down: int) -> None:
    there = Libvirt("ok", "breaks", "ok", down=down)
    with started(monkeypatch, there) as told:
        assert [told.run_state(), told.run_state()] == ["running", "running"]
    assert there.asked == ["query-status"] * 3
    assert len(there.opened) == 2


def test_what_changes_something_is_not_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Libvirt("breaks", "ok")
    with started(monkeypatch, there) as told:
        with pytest.raises(OutcomeUnknown):
            told.tell("cont", {})
        assert there.asked == ["cont"]
        told.tell("cont", {})
    assert there.asked == ["cont", "cont"]


def test_a_connection_that_broke_before_is_opened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Libvirt("ok")
    with started(monkeypatch, there) as told:
        there.opened[0].alive = False
        told.tell("cont", {})
    assert there.asked == ["cont"]


def test_a_libvirtd_that_stays_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Any = Libvirt("breaks", down=10**9)
    monkeypatch.setattr(qmp, "_RETURNS", 0.1)
    with started(monkeypatch, there) as told, pytest.raises(HostUnreachable, match="refused"):
        told.run_state()
