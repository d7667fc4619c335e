"""Processes that a controller talks to: how they are heard, and how they end."""

import asyncio
import sys
from pathlib import Path

import pytest

from vmckpt.model.host import Host
from vmckpt.remote import agent_channel
from vmckpt.remote.agent_channel import AgentProcess


def test_a_program_here_has_time_to_put_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_channel, "_ENDS_WITHIN", 0.05)
    host, mark = Host(name="here", uri="qemu:///system"), tmp_path / "undone"
    slow = f"import sys, time; sys.stdin.read(); time.sleep(1); open({str(mark)!r}, 'w')"

    async def run() -> None:
        async with AgentProcess(host, [sys.executable, "-c", slow]):
            pass

    asyncio.run(run())
    assert mark.exists()
