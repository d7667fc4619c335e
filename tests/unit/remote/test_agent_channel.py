"""Processes that a controller talks to: how they are heard, and how they end."""

import asyncio
import sys
from pathlib import Path

import pytest

from vmckpt.errors import RemoteError
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


HERE = Host(name="here", uri="qemu:///system")


async def test_it_is_spoken_with_in_lines_of_json() -> None:
    echo = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    async with AgentProcess(HERE, [sys.executable, "-c", echo]) as program:
        for number in (1, 2):
            await program.send({"a": number})
            assert await program.receive() == {"A": number}


@pytest.mark.parametrize("said", ["nonsense", "[1]", "7"])
async def test_what_makes_no_sense_is_told_with_who_said_it(said: str) -> None:
    async with AgentProcess(HERE, ["/bin/echo", said]) as program:
        with pytest.raises(RemoteError, match="here: invalid message from /bin/echo"):
            await program.receive()


async def test_one_that_has_ended_is_told_however_often_it_is_asked() -> None:
    words = ["/bin/sh", "-c", "exit 3"]
    async with AgentProcess(HERE, words) as program:
        for _ in range(2):
            with pytest.raises(RemoteError, match="here: /bin/sh exited: "):
                await program.receive()


async def test_one_that_cannot_be_started_is_one_line() -> None:
    with pytest.raises(RemoteError, match="here: cannot start /no/such: No such file"):
        async with AgentProcess(HERE, ["/no/such"]):
            pass
