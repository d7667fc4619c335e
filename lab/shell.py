"""Run commands on this machine for the lab, with one-line errors."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from vmckpt.errors import LabError

HELD: list[int] = []
"""File descriptors of locks. Commands inherit them, so a lock is held until all have exited."""


def run(args: Sequence[str], *, check: bool = True, text: str | None = None) -> str:
    """Run a command and return its output.

    Raises LabError if the program is not installed, if it runs for longer than 120 s, or, unless
    `check` is False, if it fails.

    If the caller is interrupted, the command is killed first, so that its results can be removed.
    """
    try:
        with subprocess.Popen(
            list(args),
            stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=HELD,
        ) as running:
            try:
                printed, complaint = running.communicate(text, timeout=120)
            except BaseException:
                running.kill()
                running.wait()
                raise
    except subprocess.TimeoutExpired as exc:
        raise LabError(f"{' '.join(args)}: did not exit within {exc.timeout:g} s") from exc
    except FileNotFoundError as exc:
        raise LabError(f"{args[0]} is not installed", hint="run ./check --install") from exc
    if check and running.returncode != 0:
        reason = (complaint.strip() or printed.strip()).splitlines()[-1:] or ["no error message"]
        raise LabError(f"{' '.join(args)}: {reason[0]}")
    return printed


def in_namespace(namespace: str, *args: str) -> list[str]:
    """Return the command that runs `args` in a network namespace."""
    return ["ip", "netns", "exec", namespace, *args]


def start_daemon(args: Sequence[str], log: Path) -> None:
    """Start a program that outlives this process, and append its output to a file."""
    with log.open("ab") as output:
        subprocess.run(
            ["setsid", "--fork", *args],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            check=True,
        )
