"""The agent's bundle is there whole or not at all, whatever happens to its installer."""

import gzip
import io
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.support.bundles import (
    BARE,
    drafts,
    ended,
    install,
    installed,
    small,
    started,
    versions,
    words,
)
from vmckpt.agent import bundle

__all__ = ["versions"]
LONG_AGO = time.time() - 86400


def everything(folder: Path) -> list[str]:
    return installed(folder) + drafts(folder)


def test_two_installations_at_once_leave_one(versions: Path, tmp_path: Path) -> None:
    made = small(tmp_path)
    data = bundle.archive(made).read_bytes()
    both = [
        subprocess.Popen(words(versions, made), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for one in both:
        assert one.stdin is not None
        one.stdin.write(data[:-10])
        one.stdin.flush()
    until_drafts(versions, 2)
    for one in both:
        assert one.communicate(data[-10:], timeout=60)[1] == b""

    assert [one.returncode for one in both] == [0, 0]
    assert installed(versions) == [made.name]
    assert drafts(versions) == []


def until_drafts(versions: Path, count: int) -> None:
    give_up = time.monotonic() + 20
    while not versions.is_dir() or len(drafts(versions)) < count:
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_killed_installation_leaves_nothing_that_is_taken_for_whole_and_the_next_one_clears_it(
    versions: Path, tmp_path: Path
) -> None:
    made = small(tmp_path)
    process = subprocess.Popen(words(versions, made), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(bundle.archive(made).read_bytes()[:-10])
    process.stdin.flush()
    until_drafts(versions, 1)
    process.kill()
    process.communicate()

    assert installed(versions) == []
    assert len(drafts(versions)) == 1
    assert install(versions, made).returncode == 0
    assert installed(versions) == [made.name]
    assert drafts(versions) == []


@pytest.mark.parametrize("cut", [0, 1, 100, -200])
def test_a_bundle_that_is_cut_is_not_installed(versions: Path, tmp_path: Path, cut: int) -> None:
    made = small(tmp_path)

    done = install(versions, made, data=bundle.archive(made).read_bytes()[:cut])

    assert done.returncode == 1
    assert done.stderr.startswith(b"the bundle did not arrive intact")
    assert done.stderr.count(b"\n") == 1
    assert everything(versions) == []


def test_a_bundle_with_another_content_is_not_installed(versions: Path, tmp_path: Path) -> None:
    other = bundle.archive(small(tmp_path, "other")).read_bytes()

    done = install(versions, small(tmp_path), data=other)

    assert done.stderr == b"the bundle did not arrive intact\n"
    assert everything(versions) == []


@pytest.mark.parametrize("name", ["../outside", "/outside", "site//x", "site/../../outside"])
def test_a_bundle_never_writes_outside_its_folder(
    versions: Path, tmp_path: Path, name: str
) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))

    done = install(versions, small(tmp_path), data=gzip.compress(file.getvalue()))

    assert b"an invalid member" in done.stderr
    assert everything(versions) == []
    assert list(tmp_path.rglob("outside")) == []


def test_a_full_disk_is_one_line_and_nothing_stays(versions: Path, tmp_path: Path) -> None:
    made = small(tmp_path, main="#" * 100_000)
    full = ["python3", "-c", "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE,"
            " (50000, 50000)); os.execvp(sys.argv[1], sys.argv[1:])"]  # fmt: skip

    done = install(versions, made, before=[BARE, *full[1:]])
    before = install(versions, made, size=1 << 60)

    assert done.returncode == before.returncode == 1
    assert b"File too large" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert before.stderr == f"{versions}: not enough space for {1 << 40} MiB\n".encode()
    assert everything(versions) == []


def test_what_does_not_start_is_not_installed(versions: Path, tmp_path: Path) -> None:
    made = small(tmp_path, main="import no_such_module\n")

    done = install(versions, made, program="import vmckpt.agent.main")

    assert done.stderr == (
        b"the agent does not start: ModuleNotFoundError: No module named 'no_such_module'\n"
    )
    assert everything(versions) == []


def test_what_has_ceased_to_start_is_installed_anew(versions: Path, tmp_path: Path) -> None:
    made = small(tmp_path)
    assert install(versions, made).returncode == 0
    (versions / made.name / "bin/python3").unlink()

    assert install(versions, made).returncode == 0

    assert installed(versions) == [made.name]
    assert drafts(versions) == []
    ended(started(versions, made))


def test_a_folder_where_others_may_write_is_refused(versions: Path, tmp_path: Path) -> None:
    versions.mkdir()
    versions.chmod(0o777)

    done = install(versions, small(tmp_path))

    assert done.stderr == f"{versions}: other users can write to it\n".encode()
    assert everything(versions) == []


def test_an_upgrade_ends_nothing_that_runs_and_removes_only_what_nobody_uses(
    versions: Path, tmp_path: Path
) -> None:
    one, two, three, four = (small(tmp_path, mark) for mark in "1234")
    for made in (one, two, three):
        assert install(versions, made).returncode == 0
    assert len(installed(versions)) == 3  # all were asked for just now
    for made in (one, two):
        os.utime(versions / made.name / "used", (LONG_AGO, LONG_AGO))
    running = started(versions, one)
    try:
        assert install(versions, four).returncode == 0

        assert installed(versions) == sorted(made.name for made in (one, three, four))
        assert running.poll() is None
    finally:
        ended(running)
    assert install(versions, four).returncode == 0
    assert installed(versions) == sorted(made.name for made in (three, four))
    assert drafts(versions) == []
