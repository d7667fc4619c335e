"""The limits of the code that no linter knows."""

import ast
import builtins
import re
import runpy
import subprocess
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

MODULES = sorted(
    path
    for place in ("vmckpt", "tui", "lab", "tests", "bench")
    for path in (ROOT / place).rglob("*.py")
)


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    return [(path, one) for path in MODULES for one in ast.walk(ast.parse(path.read_text()))]


def test_a_module_has_at_most_600_lines() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in MODULES}

    assert {path: size for path, size in sizes.items() if size > 600} == {}


def test_a_function_has_at_most_40_statements() -> None:
    sizes = {
        (path, node.name): sum(isinstance(one, ast.stmt) for one in ast.walk(node)) - 1
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert {where: size for where, size in sizes.items() if size > 40} == {}


def test_an_error_that_a_docstring_says_is_raised_exists() -> None:
    """A renamed class leaves its old name in prose, where no type checker looks."""
    known = {one.name for _, one in nodes() if isinstance(one, ast.ClassDef)} | {*dir(builtins)}
    for _, one in nodes():
        if isinstance(one, ast.Import | ast.ImportFrom):
            known |= {name.name.split(".")[-1] for name in one.names}
        if isinstance(one, ast.Raise) and isinstance(one.exc, ast.Call):
            known.add(ast.unparse(one.exc.func).split(".")[-1])
    lacking = {
        (path, word)
        for path, one in nodes()
        if isinstance(one, DOCUMENTED)
        for raised in re.findall(r"\bRaises ([^.;:]*)", ast.get_docstring(one) or "")
        for word in re.findall(r"\b[A-Z]\w*[a-z]\w*", raised)
        if word not in known
    }

    assert lacking == set()


def test_no_file_imports_from_a_test_file() -> None:
    """What tests share has a module of its own, in tests/support or beside them."""
    found = {
        (path, name)
        for path, one in nodes()
        if isinstance(one, ast.Import | ast.ImportFrom)
        for name in imported(one)
        if name.startswith(("tests.", "bench.")) and name.rpartition(".")[2].startswith("test_")
    }

    assert found == set()


def imported(one: ast.Import | ast.ImportFrom) -> list[str]:
    """All that may be modules, by their whole names."""
    if isinstance(one, ast.Import):
        return [each.name for each in one.names]
    return [f"{one.module}", *(f"{one.module}.{each.name}" for each in one.names)]


def test_what_a_docstring_refers_to_exists() -> None:
    """`See parts.Parts`: a module and a name in it, or a class and a name in it."""
    known: set[str] = set()
    for path, one in nodes():
        within = path.stem if isinstance(one, ast.Module) else getattr(one, "name", "")
        if isinstance(one, ast.Module | ast.ClassDef):
            known |= {f"{within}.{name}" for name in _defined(one)}
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in MODULES]
    known |= {".".join(each[-2:]) for each in parts}
    lacking = {
        (path, name)
        for path, one in nodes()
        if isinstance(one, DOCUMENTED)
        for name in re.findall(r"\b[Ss]ee `?((?:\w+\.)+(?!md\b)\w+)", ast.get_docstring(one) or "")
        if ".".join(name.split(".")[-2:]) not in known
    }

    assert lacking == set()


def _defined(whole: ast.Module | ast.ClassDef) -> set[str]:
    """Names of its functions, classes, constants and fields."""
    found = {str(getattr(one, "name", "")) for one in whole.body}
    for one in whole.body:
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


def test_no_file_names_a_path_of_one_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    forbidden = ("/work" + "/", "/opt/" + "pypi", "pypi" + ".org", "deb.debian" + ".org")
    found = [
        (name, word)
        for name in listed
        if (ROOT / name).is_file() and (ROOT / name).stat().st_size < 1 << 20
        for word in forbidden
        if word in (ROOT / name).read_text(errors="ignore")
    ]

    assert found == []


def test_pyproject_lists_every_package_and_every_module_that_says_it_is_pure() -> None:
    found = runpy.run_path(str(ROOT / "scripts/modules"))
    text = found["FILE"].read_text()

    assert found["written"](text) == text, "run scripts/modules"


def test_the_core_runs_without_the_dashboard_and_its_library() -> None:
    code = (
        "import vmckpt.cli.app, sys; print('textual' in sys.modules, 'vmckpt_tui' in sys.modules)"
    )
    seen = subprocess.run(
        [ROOT / ".venv/bin/python", "-c", code], capture_output=True, text=True, check=True
    )

    assert seen.stdout == "False False\n"


def test_a_module_has_a_test_of_its_name() -> None:
    found = runpy.run_path(str(ROOT / "scripts/structure"))
    lacking = set(found["without_test"](found["modules"]()))
    assert lacking == set(found["ELSEWHERE"]), "name its test like it, or say where it is"
    for place in found["ELSEWHERE"].values():
        for name in place.split():
            if name.startswith(("unit/", "lab/")):
                assert (ROOT / "tests" / name).exists(), name
