"""The JSON schema of policy files, for editors; policies/schema.json is a copy. Pure."""

import json
from typing import Any

from vmckpt.policy.schema import PolicyForm


def schema() -> dict[str, Any]:
    """Return the schema, generated from the forms in policy.schema."""
    made: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_tidy(PolicyForm.model_json_schema()),
        "title": "vmckpt policy",
    }
    return made


def text() -> str:
    """Return the text of policies/schema.json."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _tidy(node: Any) -> Any:
    """Return a node without parts that are useless in an editor: defaults, titles and nulls."""
    if isinstance(node, list):
        return [_tidy(one) for one in node if one != {"type": "null"}]
    if not isinstance(node, dict):
        return node
    kept = {
        key: {name: _tidy(one) for name, one in value.items()}
        if key in ("properties", "$defs")
        else _tidy(value)
        for key, value in node.items()
        if key not in ("default", "title")
    }
    # A choice between a value and null becomes the value, as keys without a value are refused.
    if len(kept.get("anyOf", ())) == 1:
        kept |= kept.pop("anyOf")[0]
    return kept
