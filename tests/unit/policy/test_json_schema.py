"""The schema of policy files for editors."""

from tests.support.policies import SHIPPED
from vmckpt.policy import json_schema


def test_the_schema_beside_them_is_the_one_of_the_form() -> None:
    stored = (SHIPPED / "schema.json").read_text(encoding="utf-8")

    assert stored == json_schema.text(), "run: vmckpt policy schema > policies/schema.json"


def test_the_schema_says_what_each_key_is_for_and_allows_no_others() -> None:
    made = json_schema.schema()
    objects = [made, *(one for one in made["$defs"].values() if one.get("type") == "object")]

    for one in objects:
        assert one["additionalProperties"] is False
        for key, value in one["properties"].items():
            assert "description" in value or "$ref" in value, key
