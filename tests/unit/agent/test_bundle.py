"""The agent's bundle: what is in it, and how it gets into a folder of a host."""

import ast
import gzip
import io
import os
import subprocess
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path

import pytest

import vmckpt
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
from vmckpt import __version__
from vmckpt.agent import bundle
from vmckpt.errors import RemoteError

__all__ = ["versions"]
ROOT = Path(vmckpt.__file__).parent
LONG_AGO = time.time() - 86400
# Imported if they happen to be there; nothing of ours needs them.
BY_THE_WAY = {"bcrypt", "setuptools", "certifi"}


def everything(folder: Path) -> list[str]:
    return installed(folder) + drafts(folder)


def file_of(module: str) -> Path | None:
    at = ROOT.parent.joinpath(*module.split("."))
    return next((p for p in (at.with_suffix(".py"), at / "__init__.py") if p.exists()), None)


def reached() -> set[str]:
    """Our modules that an agent may come to import, also late, as their text says."""
    seen: set[str] = set()
    todo = [*bundle.MODULES]
    while todo:
        path = file_of(module := todo.pop())
        if path is None or module in seen:
            continue
        seen.add(module)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                todo += [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return {one for one in seen if one.startswith("vmckpt")}


def test_the_list_names_just_the_distributions_that_an_agent_imports() -> None:
    code = f"import sys, {', '.join(sorted(reached()))}; print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    providers = metadata.packages_distributions()
    tops = {name.split(".")[0] for name in told.split()} - sys.stdlib_module_names
    seen = {one.lower().replace("_", "-") for top in tops for one in providers.get(top, ())}

    assert seen - {"vmckpt"} - BY_THE_WAY == set(bundle.DISTRIBUTIONS)


def test_the_real_bundle_starts_on_a_bare_python_and_imports_nothing_from_here(
    versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_LEVEL", 1)
    made = bundle.current()
    assert bundle.archive(made).stat().st_size < 40 << 20

    done = install(versions, made, program=f"import {', '.join(bundle.MODULES)}")

    assert done.returncode == 0, done.stderr
    assert installed(versions) == [made.name]
    assert drafts(versions) == []
    own = versions / made.name
    code = f"import sys, {', '.join(sorted(reached()))}\n" + (
        "for one in list(sys.modules.values()):\n"
        "    print(getattr(one, '__file__', None) or '-')\n"
        "print(sys.executable)"
    )
    seen = subprocess.run(
        ["env", "-i", own / "bin/python3", "-c", code],
        cwd=ROOT.parent.parent, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert seen[-1] == str(own / "bin/python3")
    assert [one for one in seen if one.startswith((str(ROOT.parent), sys.prefix))] == []
    assert [one for one in seen if "-packages" in one and not one.startswith(str(own))] == []
    assert any(one.endswith("vmckpt/agent/replication/main.py") for one in seen)
    told = subprocess.run(
        ["env", "-i", f"PYTHONPATH={ROOT.parent}", own / "bin/vmckpt-agent"],
        input=b'{"do": "nothing"}\n', capture_output=True, check=False,
    )  # fmt: skip
    assert b"an order that is not known: 'nothing'" in told.stdout


def test_the_version_is_told_before_anything_heavy_is_imported() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "vmckpt.agent.main", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert done.stdout == f"{__version__}\n"
    assert "numpy" not in done.stderr


def test_a_bundle_is_called_by_what_is_in_it(versions: Path, tmp_path: Path) -> None:
    one, again, other = small(tmp_path), small(tmp_path), small(tmp_path, "other")

    assert one.name == again.name != other.name
    first = bundle.archive(one).read_bytes()
    bundle.archive(one).unlink()
    assert bundle.archive(again).read_bytes() == first
    bundle.archive(other)
    assert [path.name for path in (tmp_path / "state/agents").iterdir()] == [f"{other.name}.tar.gz"]


def test_what_is_not_installed_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "DISTRIBUTIONS", ("no-such-thing",))
    bundle.current.cache_clear()

    with pytest.raises(RemoteError, match="no-such-thing is not installed here"):
        bundle.current()


def test_a_distribution_without_a_list_of_files_is_taken_by_its_modules() -> None:
    package = dict(bundle._of_module("yaml"))
    module = dict(bundle._of_module("six"))

    assert "site/yaml/__init__.py" in package
    assert list(module) == ["site/six.py"]


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
    assert done.stderr.startswith(b"the bundle did not arrive whole")
    assert done.stderr.count(b"\n") == 1
    assert everything(versions) == []


def test_a_bundle_with_another_content_is_not_installed(versions: Path, tmp_path: Path) -> None:
    other = bundle.archive(small(tmp_path, "other")).read_bytes()

    done = install(versions, small(tmp_path), data=other)

    assert done.stderr == b"the bundle did not arrive whole\n"
    assert everything(versions) == []


@pytest.mark.parametrize("name", ["../outside", "/outside", "site//x", "site/../../outside"])
def test_a_bundle_never_writes_outside_its_folder(
    versions: Path, tmp_path: Path, name: str
) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))

    done = install(versions, small(tmp_path), data=gzip.compress(file.getvalue()))

    assert b"a strange file" in done.stderr
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
    assert before.stderr == f"{versions}: no room for {1 << 40} MiB\n".encode()
    assert everything(versions) == []


def test_what_does_not_start_is_not_installed(versions: Path, tmp_path: Path) -> None:
    made = small(tmp_path, main="import no_such_module\n")

    done = install(versions, made, program="import vmckpt.agent.main")

    assert done.stderr == (
        b"it does not start: ModuleNotFoundError: No module named 'no_such_module'\n"
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

    assert done.stderr == f"{versions}: others may write there\n".encode()
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
