"""Which process asks and controls, and whether a controller still lives."""

import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt.journal import controller_identity
from vmckpt.journal.records import ControllerIdentity


def test_a_controller_is_known_by_its_start_and_its_boot() -> None:
    me = controller_identity.this_process()

    def other(**changes: object) -> ControllerIdentity:
        fields = {"host": me.host, "boot": me.boot, "pid": me.pid, "started": me.started}
        return ControllerIdentity(**{**fields, **changes})  # type: ignore[arg-type]

    assert controller_identity.is_alive(me) is True
    assert controller_identity.is_alive(other(started=me.started + 1)) is False
    assert controller_identity.is_alive(other(boot="another")) is False
    assert controller_identity.is_alive(other(pid=2**22 + 1)) is False
    # This machine, called otherwise since; another one; this one before it was booted.
    assert controller_identity.is_alive(other(host="elsewhere.invalid")) is True
    assert controller_identity.is_alive(other(host="elsewhere.invalid", pid=2**22 + 1)) is False
    assert controller_identity.is_alive(other(host="elsewhere.invalid", boot="another")) is None


def test_a_process_that_nobody_has_looked_after_has_ended() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}/stat").exists()
        me = controller_identity.this_process()
        started = controller_identity._started(process.pid)
        zombie = replace(me, pid=process.pid, started=started or 1)
        assert (started, controller_identity.is_alive(zombie)) == (None, False)


def test_behind_sudo_it_is_who_called_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = socket.gethostname()
    monkeypatch.setenv("SUDO_USER", "anna")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert controller_identity.asked_by() == f"anna@{name}"
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)  # of no name; its SUDO_USER is nobody's
    assert controller_identity.asked_by() == f"4000000@{name}"


def test_a_session_of_ssh_comes_from_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 50000 192.0.2.1 22")
    assert controller_identity.asked_from() == "192.0.2.7"
    monkeypatch.delenv("SSH_CONNECTION")

    def no_terminal(_: int) -> str:
        raise OSError("not a tty")

    monkeypatch.setattr(os, "ttyname", no_terminal)
    assert controller_identity.asked_from() is None
