"""Deprecated fields of --json and the fields that replace them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def deprecated() -> dict[str, str]:
    """Each deprecated field and its replacement, from the table in docs/reference.md."""
    section = (ROOT / "docs/reference.md").read_text().split("\n## JSON\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    pairs = [[re.findall(r"`(\w+)`", cell) for cell in row] for row in rows]
    return {old: new for olds, news in pairs for old, new in zip(olds, news, strict=True)}


def properties(schema: Any) -> Iterator[dict[str, Any]]:
    """The properties of each object in a schema."""
    if isinstance(schema, dict):
        if isinstance(found := schema.get("properties"), dict):
            yield found
        for value in schema.values():
            yield from properties(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from properties(value)


def test_a_deprecated_field_has_its_replacement_beside_it_and_is_documented() -> None:
    known, seen = deprecated(), set()
    for path in sorted((ROOT / "vmckpt/cli/schemas").glob("*.json")):
        for each in properties(json.loads(path.read_text())):
            for name in each.keys() & known.keys():
                new = known[name]
                old_schema = {k: v for k, v in each[name].items() if k != "deprecated"}
                assert each[name].get("deprecated") is True, f"{path.name}: {name}"
                assert each.get(new) == old_schema, f"{path.name}: {name}, {new}"
                seen.add(name)
            marked = {name for name, one in each.items() if dict(one).get("deprecated")}
            assert marked <= known.keys(), path.name
    assert seen == known.keys()
