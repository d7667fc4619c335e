"""A command under guard: what takes the guest back, and how programs outside are run."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from vmckpt.errors import BadInput
from vmckpt.model.guest import GuestState
from vmckpt.snapshot import guard_rules
from vmckpt.snapshot.guard import Outside, in_words
from vmckpt.snapshot.restore import hook as restore_hook
from vmckpt.units import Seconds

RUNNING, PAUSED, OFF = GuestState.RUNNING, GuestState.PAUSED, GuestState.SHUT_OFF


@pytest.mark.parametrize(
    ("status", "stopped", "why"),
    [
        (0, False, ""),
        (3, False, "the command failed: exit status 3"),
        (-9, False, "the command failed: killed by SIGKILL"),
        (0, True, "the command was interrupted"),
        (1, True, "the command was interrupted"),
    ],
)
def test_its_end_takes_the_guest_back(status: int, stopped: bool, why: str) -> None:
    assert guard_rules.wrong_with_command(status, stopped=stopped) == why


@pytest.mark.parametrize(
    ("states", "silent", "was_paused", "why"),
    [
        ({"alpha": RUNNING}, [], False, ""),
        ({"alpha": OFF, "beta": RUNNING}, [], False, ""),
        ({"alpha": GuestState.BLOCKED}, ["beta"], False, ""),
        ({"alpha": PAUSED}, [], False, "the guest is paused on alpha"),
        ({"alpha": PAUSED}, [], True, ""),
        ({"alpha": GuestState.CRASHED}, [], True, "the guest is crashed on alpha"),
        ({}, [], False, "the guest is not running on any host"),
        (
            {},
            ["beta"],
            False,
            "the guest is not running on any host that answers; no answer from beta",
        ),
    ],
)
def test_the_guest_must_still_run(
    states: Mapping[str, GuestState], silent: list[str], was_paused: bool, why: str
) -> None:
    assert guard_rules.wrong_with_guest(states, silent, was_paused=was_paused) == why


def test_a_checkpoint_is_tagged_with_the_program_and_not_its_secrets() -> None:
    assert guard_rules.tags(["/usr/bin/ssh", "root@web1", "--password=x"]) == {"guard": "ssh"}
    assert guard_rules.tags(["a\nb"]) == {"guard": "ab"}


async def test_a_program_is_run_with_what_it_is_told(tmp_path: Path) -> None:
    outside, file = Outside(quiet=True), tmp_path / "told"
    assert await outside.run(["sh", "-c", f'echo "$WHO" > {file}; exit 7'], {"WHO": "web1"}) == 7
    assert file.read_text() == "web1\n"
    assert await outside.shell("exit 3", {}, None) == 3
    with pytest.raises(BadInput, match="cannot run"):
        await outside.run([str(tmp_path / "none")], {})


def runs(word: str) -> bool:
    """Whether there is a process that was started with it."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if word.encode() in process.read_bytes().split(b"\0"):
                return True
    return False


async def test_a_signal_reaches_the_program_and_one_that_is_slow_is_ended(tmp_path: Path) -> None:
    outside, file = Outside(quiet=True), tmp_path / "began"
    running = asyncio.create_task(outside.shell(f"echo $$ > {file}; exec sleep 60", {}, None))
    while not (file.exists() and file.read_text()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    outside.pass_on(signal.SIGHUP)
    assert await running == -signal.SIGHUP
    outside.pass_on(signal.SIGHUP)
    slow = f"60.{os.getpid()}"  # known by that also if it was ended before it could say its number
    with pytest.raises(TimeoutError):
        await outside.shell(f"exec sleep {slow}", {}, Seconds(0.3))
    assert not runs(slow)


def test_how_a_program_ended_is_said() -> None:
    assert [in_words(one) for one in (2, -15, -77)] == [
        "exit status 2", "killed by SIGTERM", "killed by signal 77",
    ]  # fmt: skip
    assert "its network links stay down" in restore_hook.hook_complaint("x", 1, links_down=True)
