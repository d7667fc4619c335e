"""The log of an agent that fails over and over stays small: it lies in memory."""

import subprocess
import sys
from pathlib import Path

import pytest

BOUND = """
import sys
from pathlib import Path
from vmckpt.agent.replication import main
main._bound_log(Path(sys.argv[1]))
sys.stderr.write("the next line\\n")
"""


@pytest.mark.parametrize(("lines", "kept"), [(100, 100), (40_000, 2184)])
def test_only_the_end_of_a_large_one_is_kept(tmp_path: Path, lines: int, kept: int) -> None:
    log = tmp_path / "agent.log"
    log.write_text("".join(f"{number:029}\n" for number in range(lines)))
    with log.open("ab") as out:
        subprocess.run([sys.executable, "-c", BOUND, tmp_path], stderr=out, check=True)
    found = log.read_text().splitlines()
    assert found[-1] == "the next line"
    assert found[-2] == f"{lines - 1:029}"
    assert kept <= len(found) <= kept + 2


def test_what_is_no_log_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "agent.log").write_text("x" * (2 << 20))
    with (tmp_path / "other").open("ab") as out:
        subprocess.run([sys.executable, "-c", BOUND, tmp_path], stderr=out, check=True)
    assert (tmp_path / "agent.log").stat().st_size == 2 << 20
