"""The program from its first moment: closed streams, Ctrl-C while it loads, groups alone."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

PROGRAM = (sys.executable, "-m", "vmckpt.cli.__main__")


def closing(*numbers: int) -> Callable[[], None]:
    """For a child: these streams are closed when it begins."""

    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_are_no_error_and_no_file_takes_their_number(
    closed: tuple[int, ...],
) -> None:
    done = subprocess.run(
        [*PROGRAM, "policy", "list", "--json"], check=False, capture_output=True, text=True,
        preexec_fn=closing(*closed),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert ('"balanced"' in done.stdout) == (1 not in closed)


def test_ctrl_c_while_it_loads_ends_it_in_silence() -> None:
    program = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "vmckpt.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from vmckpt.cli.__main__ import main
main()
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "words", [[], ["snapshot"], ["snapshot", "keys"], ["maintenance"], ["policy"], ["lab"]]
)
def test_a_group_alone_shows_its_help_as_a_result(words: list[str]) -> None:
    done = subprocess.run([*PROGRAM, *words], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(["Usage: vmckpt", *words, "[OPTIONS] COMMAND"]))
