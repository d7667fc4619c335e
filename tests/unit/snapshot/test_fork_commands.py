"""Commands that run once per fork: how many at a time, what is kept of them, and how they end."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from vmckpt.snapshot import fork_commands
from vmckpt.snapshot.fork_commands import ForkCommand
from vmckpt.snapshot.fork_rules import Ran


def commands(*texts: str) -> list[ForkCommand]:
    return [
        ForkCommand(name=f"f{n}", command=text, environment={"VMCKPT_GUEST": f"f{n}"})
        for n, text in enumerate(texts)
    ]


async def run(*texts: str, parallel: int = 8, stop: asyncio.Event | None = None) -> list[Ran]:
    told: list[Ran] = []
    stop = stop or asyncio.Event()
    done = await fork_commands.run_all(commands(*texts), parallel, stop, told.append)
    assert list(done) == told
    return told


async def test_output_status_and_environment_belong_to_the_fork() -> None:
    done = await run("echo $VMCKPT_GUEST; echo bad >&2; exit 3", "echo $VMCKPT_GUEST; printf 7.5")
    first, second = sorted(done, key=lambda one: one.name)
    assert (first.status, first.output, first.errors, first.score) == (3, "f0\n", "bad\n", None)
    assert (second.status, second.output, second.score) == (0, "f1\n7.5", 7.5)


async def test_they_run_at_once_and_results_are_in_the_order_of_the_ends(tmp_path: Path) -> None:
    # Each waits for a file that the next creates, so they end in reverse order.
    wait = "while [ ! -e {0}/{1} ]; do sleep 0.01; done; touch {0}/{2}"
    texts = [wait.format(tmp_path, n + 1, n) for n in range(3)] + [f"touch {tmp_path}/3"]
    assert [one.name for one in await run(*texts, parallel=4)] == ["f3", "f2", "f1", "f0"]


async def test_no_more_run_at_a_time_than_allowed(tmp_path: Path) -> None:
    text = f"ls {tmp_path} | wc -l; touch {tmp_path}/$$; sleep 0.05; rm {tmp_path}/$$"
    done = await run(*[text] * 6, parallel=2)
    assert max(int(one.output) for one in done) == 1


async def test_only_the_end_of_much_output_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_commands, "_MOST", 100)
    (done,) = await run("seq 100000; echo 42")
    assert (len(done.output), done.score) == (100, 42)


async def test_a_process_left_behind_does_not_delay_the_result() -> None:
    began = time.monotonic()
    (done,) = await run("sleep 20 & echo $!; exit 0")
    assert (done.status, time.monotonic() - began < 10) == (0, True)
    os.kill(int(done.output), 9)


async def test_stopping_ends_running_commands_with_their_children(tmp_path: Path) -> None:
    stop, file = asyncio.Event(), tmp_path / "pid"
    running = asyncio.create_task(
        run(f"sleep 600 & echo $! > {file}; wait", "echo late", parallel=1, stop=stop)
    )
    while not (file.exists() and file.read_text()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    stop.set()
    (done,) = await running  # the second was not started
    assert (done.name, done.status) == ("f0", -15)
    for _ in range(500):
        if not alive(int(file.read_text())):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the child is still running")


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and ") Z " not in state.read_text()


async def test_a_shell_that_cannot_be_started_is_a_failed_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_commands, "_SHELL", "/nonexistent/sh")
    (done,) = await run("true")
    assert (done.status, done.errors) == (
        127, "cannot run /nonexistent/sh: No such file or directory",
    )  # fmt: skip
