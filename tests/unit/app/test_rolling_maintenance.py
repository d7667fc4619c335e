"""Hosts one after the other: when one is well again, and whose hosts are left alone."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.builders import HOST
from vmckpt.app import evacuation, hosts, rolling_maintenance
from vmckpt.errors import Blocked, HookFailed, RemoteError
from vmckpt.journal import controller_identity, maintenance
from vmckpt.journal import location as locations
from vmckpt.units import Seconds


class Host:
    """Its command breaks the connection; `starts`: what it says of its start, look by look."""

    def __init__(self, *starts: str | None, status: int | None = None) -> None:
        self.starts, self.status = list(starts), status

    def __call__(self, _: object) -> "Host":
        return self

    async def __aenter__(self) -> "Host":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def run(self, args: list[str], **_: object) -> Any:
        if "eval" in args[2:3] or args[1] == "-c":
            if self.status is None:
                raise RemoteError("alpha: the connection broke")
            return SimpleNamespace(status=self.status, out="", err="killed")
        start = self.starts.pop(0) if len(self.starts) > 1 else self.starts[0]
        if start is None:
            raise RemoteError("alpha: no route")
        return SimpleNamespace(status=0, out=start, err="")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def doctor(*_: object) -> list[Any]:
        return []

    monkeypatch.setattr(hosts, "doctor", doctor)
    monkeypatch.setattr(rolling_maintenance, "_AGAIN", Seconds(0.01))


async def through(monkeypatch: pytest.MonkeyPatch, host: Host, limit: float = 5.0) -> None:
    monkeypatch.setattr(rolling_maintenance, "Remote", host)
    left = await rolling_maintenance._run(
        HOST, "the command", "upgrade", Seconds(5.0), "empty", may_go=True
    )
    inventory: Any = None
    await rolling_maintenance._well(inventory, HOST, Seconds(limit), asyncio.Event(), left=left)


async def test_a_connection_that_breaks_is_no_reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HookFailed, match="since; the command may still be running"):
        await through(monkeypatch, Host("b1 10"), limit=0.1)
    with pytest.raises(HookFailed, match="since; the command may still be running"):
        await through(monkeypatch, Host("b1 10", status=-1), limit=0.1)


@pytest.mark.parametrize("again", ["b2 10", "b1 99"])
async def test_a_host_that_was_started_again_is_well(
    monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    host = Host("b1 10", "b1 10", None, f"{again} stopping", again)
    await through(monkeypatch, host)
    assert host.starts == [again]


async def test_a_command_that_ended_needs_no_reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    await through(monkeypatch, Host("b1 10", status=0))
    with pytest.raises(HookFailed, match="is shutting down"):
        await through(monkeypatch, Host("b1 10 stopping", status=0), limit=0.1)
    with pytest.raises(HookFailed, match="exited with status 3: killed"):
        await through(monkeypatch, Host("b1 10", status=3))


def test_a_host_that_somebody_closed_for_another_reason_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(locations.VARIABLE, str(tmp_path / "journal.db"))
    maintenance.enter("beta", "kernel")
    rolling_maintenance._free(["alpha", "beta"], "kernel")
    with pytest.raises(Blocked, match="beta: it is in maintenance") as caught:
        rolling_maintenance._free(["alpha", "beta"], "")
    assert "vmckpt maintenance leave beta" in (caught.value.hint or "")
    # Who ended that by hand would give up who is to come back.
    monkeypatch.setattr(evacuation, "was_emptied", lambda _: True)
    with pytest.raises(Blocked) as caught:
        rolling_maintenance._free(["beta"], "")
    assert "vmckpt repopulate beta" in (caught.value.hint or "")
    monkeypatch.setattr(controller_identity, "asked_by", lambda: "alice@desk")
    with pytest.raises(Blocked):
        rolling_maintenance._free(["beta"], "kernel")
