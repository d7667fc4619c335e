"""The agent's bundle: what is in it, what it is called, and that it starts."""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import vmckpt
from tests.support.bundles import (
    drafts,
    install,
    installed,
    small,
    versions,
)
from vmckpt import __version__
from vmckpt.agent import bundle
from vmckpt.errors import RemoteError
from vmckpt.remote import agent_install

__all__ = ["versions"]
ROOT = Path(vmckpt.__file__).parent
# Imported if they happen to be there; nothing of ours needs them.
BY_THE_WAY = {"bcrypt", "setuptools", "certifi"}


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
    assert b"unknown order 'nothing'" in told.stdout


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

    with pytest.raises(RemoteError, match="no-such-thing is not installed on this machine"):
        bundle.current()


def test_a_distribution_without_a_list_of_files_is_taken_by_its_modules() -> None:
    package = dict(bundle._of_module("yaml"))
    module = dict(bundle._of_module("six"))

    assert "site/yaml/__init__.py" in package
    assert list(module) == ["site/six.py"]


def packaged(prefix: Path, minor: int, distributions: tuple[str, ...]) -> None:
    """Put distributions where a package of several Pythons has those of one of them."""
    site = prefix / f"lib/python3.{minor}/site-packages"
    for name in distributions:
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{name}/main.py,,\n")
        (site / name).mkdir()
        (site / name / "main.py").write_text(f"# {minor}\n")
    (site / bundle.MARK).write_text("../../../any\n")


def test_there_is_a_bundle_for_each_python_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = sys.version_info[1]
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(bundle, "DISTRIBUTIONS", ("one", "other"))
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    (tmp_path / "lib/python3.80/site-packages").mkdir(parents=True)  # of something else
    for minor, names in ((own, ("one", "other")), (98, ("one", "other")), (99, ("one",))):
        packaged(tmp_path, minor, names)
    bundle.pythons.cache_clear()
    tags = bundle.pythons()
    bundle.pythons.cache_clear()
    assert tags[0] == agent_install.OURS
    assert [agent_install.python_version(tag) for tag in tags] == [f"3.{own}", "3.99", "3.98"]

    made = bundle.for_python(tags[2])
    assert tags[2] in made.name
    assert made.files["site/one/main.py"].read_text() == "# 98\n"
    assert "site/vmckpt/agent/main.py" in made.files
    with pytest.raises(RemoteError, match="other is not installed on this machine"):
        bundle.for_python(tags[1])

    # An archive for another Python stays when this one's is built anew.
    first = bundle.archive(made)
    bundle.archive(small(tmp_path))
    assert first.exists()
    bundle.forget(first)
    assert not first.exists()
