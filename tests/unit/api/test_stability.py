"""The API changes only together with its version.

tests/fixtures/api.json describes the API. After a change, raise API_VERSION as docs/api.md says,
and run VMCKPT_UPDATE=1 pytest tests/unit/api/test_stability.py to write the file again.
"""

import dataclasses
import inspect
import json
import os
from typing import Any

import pytest

from tests.support.paths import ROOT
from vmckpt import api

FILE = ROOT / "tests/fixtures/api.json"
Surface = dict[str, Any]


def described() -> Surface:
    """The classes, methods, arguments, fields and errors of the API, with their types."""
    found: Surface = {}
    for name in api.__all__:
        one = getattr(api, name)
        if not inspect.isclass(one):
            continue
        if issubclass(one, Exception):
            bases = [each.__name__ for each in one.__mro__ if each.__name__ in api.__all__]
            found[name] = {"is": bases[1:], "exit_code": str(getattr(one, "exit_code", ""))}
        elif dataclasses.is_dataclass(one):
            found[name] = {each.name: _type(each.type) for each in dataclasses.fields(one)}
        else:
            for method, function in vars(one).items():
                if method == "__init__" or not method.startswith("_"):
                    found[f"{name}.{method}"] = _signature(function)
    return found


def _type(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _signature(function: Any) -> dict[str, str]:
    told = inspect.signature(function)
    parts = {
        one.name: f"{one.kind.name.lower()} {inspect.formatannotation(one.annotation)}"
        + ("" if one.default is one.empty else f" = {one.default!r}")
        for one in told.parameters.values() if one.name != "self"
    }  # fmt: skip
    how = "async " if inspect.iscoroutinefunction(function) else ""
    return {**parts, "returns": how + inspect.formatannotation(told.return_annotation)}


def change(old: Surface, new: Surface) -> str | None:
    """Return which version a change needs: "major", "minor", or None if there is no change."""
    if old == new:
        return None
    for name, parts in old.items():
        if name not in new or any(new[name].get(part) != told for part, told in parts.items()):
            return "major"
        added = set(new[name]) - set(parts)
        if "." in name and any(" = " not in new[name][one] for one in added):
            return "major"  # an argument without a default
    return "minor"


def allowed(before: list[int], after: tuple[int, int], needed: str | None) -> bool:
    """Whether the version was raised as the change needs."""
    major, minor = before
    if needed is None:
        return list(after) == before
    return after == ((major + 1, 0) if needed == "major" else (major, minor + 1))


def test_the_api_changes_only_with_its_version() -> None:
    stored = json.loads(FILE.read_text()) if FILE.exists() else None
    new = json.loads(json.dumps(described()))
    if stored is not None:
        needed = change(stored["api"], new)
        assert allowed(stored["version"], api.API_VERSION, needed), (
            f"the API has changed and needs a new {needed} version: see API_VERSION"
            if needed else "API_VERSION was raised without a change of the API"
        )  # fmt: skip
    if os.environ.get("VMCKPT_UPDATE"):
        FILE.write_text(json.dumps({"version": api.API_VERSION, "api": new}, indent=1) + "\n")
    stored = json.loads(FILE.read_text())
    assert (stored["version"], stored["api"]) == (list(api.API_VERSION), new), (
        "write the description again: VMCKPT_UPDATE=1"
    )


OLD = {"Client.go": {"to": "positional str", "returns": "None"}, "Host": {"name": "str"}}


@pytest.mark.parametrize(
    ("new", "needed"),
    [
        (OLD, None),
        ({**OLD, "Guest": {"name": "str"}}, "minor"),
        ({**OLD, "Host": {"name": "str", "uri": "str"}}, "minor"),
        ({**OLD, "Client.go": {**OLD["Client.go"], "by": "keyword_only str = ''"}}, "minor"),
        ({**OLD, "Client.go": {**OLD["Client.go"], "by": "keyword_only str"}}, "major"),
        ({**OLD, "Client.go": {"to": "positional int", "returns": "None"}}, "major"),
        ({**OLD, "Client.go": {"returns": "None"}}, "major"),
        ({"Host": {"name": "str"}}, "major"),
        ({**OLD, "Host": {}}, "major"),
    ],
)
def test_which_version_a_change_needs(new: Surface, needed: str | None) -> None:
    assert change(OLD, new) == needed


def test_a_version_is_raised_by_one_step() -> None:
    assert allowed([1, 2], (1, 2), None)
    assert not allowed([1, 2], (1, 3), None)
    assert allowed([1, 2], (1, 3), "minor")
    assert allowed([1, 2], (2, 0), "major")
    for wrong in ((1, 2), (1, 3), (2, 1)):
        assert not allowed([1, 2], wrong, "major")


def test_the_fixture_names_no_internal_type() -> None:
    """Every type of the API that a program sees is exported."""
    text = json.dumps(json.loads(FILE.read_text())["api"])
    assert "vmckpt.app" not in text
    assert "vmckpt.model" not in text
    for name in dir(api.results):
        if dataclasses.is_dataclass(getattr(api.results, name)):
            assert name in api.__all__
