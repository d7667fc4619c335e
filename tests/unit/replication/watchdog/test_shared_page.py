"""The page of memory between an agent and its guard."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vmckpt.replication.watchdog import shared_page
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt.units import Seconds


def test_what_one_writes_the_other_reads(tmp_path: Path) -> None:
    one = WatchdogPage.create(tmp_path / "page", lasts=Seconds(4.0))
    other = WatchdogPage.open(tmp_path / "page")

    assert (other.renewed, other.lasts, other.stopped, other.agent) == (0, 4.0, 0, 0)
    one.renewed, one.stopped, one.lasts = 12.5, 13.25, 3.0
    one.agent = shared_page.identity(os.getpid())
    one.beat()
    other.guarded = 14.0
    assert (other.renewed, other.stopped, other.lasts, other.beats) == (12.5, 13.25, 3.0, 1)
    assert shared_page.process_of(other.agent) == os.getpid()
    assert one.guarded == 14.0
    one.lose()
    assert other.renewed == float("-inf")
    one.close()
    other.close()


def test_a_page_is_made_once(tmp_path: Path) -> None:
    """Or a guard would go on looking at one that nobody writes to."""
    page = WatchdogPage.create(tmp_path / "page", lasts=Seconds(4.0))
    page.renewed = 7.0
    with pytest.raises(FileExistsError):
        WatchdogPage.create(tmp_path / "page", lasts=Seconds(1.0))

    assert page.renewed == 7.0
    assert [file.name for file in tmp_path.iterdir()] == ["page"]
    page.close()


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * shared_page.SIZE])
def test_another_file_is_no_page(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "page").write_bytes(content)
    with pytest.raises(ValueError, match="is not a watchdog page"):
        WatchdogPage.open(tmp_path / "page")


def test_a_process_is_not_taken_for_another_with_its_number() -> None:
    known = shared_page.identity(os.getpid())
    later = known + (1 << 22)

    assert shared_page.process_of(later) == os.getpid()
    assert later != shared_page.identity(os.getpid())
    with pytest.raises(ProcessLookupError):
        shared_page.identity((1 << 22) - 1)


_WRITER = """
import sys
from pathlib import Path
from vmckpt.replication.watchdog.shared_page import WatchdogPage
page = WatchdogPage.open(Path(sys.argv[1]))
print(flush=True)
while not page.beats:
    page.renewed = 1.1e300
    page.renewed = -3.3e-300
"""


def test_nobody_sees_half_of_a_value(tmp_path: Path) -> None:
    page = WatchdogPage.create(tmp_path / "page", lasts=Seconds(4.0))
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path / "page")], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    found = {page.renewed for _ in range(300_000)}
    for _ in range(100):  # on a busy machine the writer may not have had its turn twice
        if len(found - {0.0}) > 1:
            break
        found |= {page.renewed for _ in range(30_000)}
    page.beat()
    writer.communicate()

    assert found - {0.0} == {1.1e300, -3.3e-300}
    page.close()
