"""Run the machine's own tools for the lab, with errors of one line."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from vmckpt.errors import LabError

HELD: list[int] = []
"""Descriptors of locks, which commands inherit: a lock is held until they have ended, too."""


def run(args: Sequence[str], *, check: bool = True, text: str | None = None) -> str:
    """Run a command to its end and return what it printed; LabError if it fails.

    It has ended as well if we are interrupted: what it was making is whole or can be removed.
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
        raise LabError(f"{' '.join(args)}: no end in {exc.timeout:g} s") from exc
    except FileNotFoundError as exc:
        raise LabError(f"{args[0]} is not installed here", hint="run ./check --install") from exc
    if check and running.returncode != 0:
        reason = (complaint.strip() or printed.strip()).splitlines()[-1:] or ["no reason"]
        raise LabError(f"{' '.join(args)}: {reason[0]}")
    return printed


def in_namespace(namespace: str, *args: str) -> list[str]:
    """The command that runs `args` on the network of a namespace."""
    return ["ip", "netns", "exec", namespace, *args]


def start_daemon(args: Sequence[str], log: Path) -> None:
    """Start a program that outlives us, as nobody's child, with its output in a file."""
    with log.open("ab") as output:
        subprocess.run(
            ["setsid", "--fork", *args],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            check=True,
        )
