"""What the witness keeps is touched by nobody but through the calls that an agent may make."""

import re

import pytest

from vmckpt.lease import schema

MADE = re.findall(
    r"CREATE OR REPLACE FUNCTION vmckpt_lease\.(\w+)\(\s*(.*?)\s*\)\s*RETURNS [\w.]+ (.*?) AS \$\$",
    schema.FUNCTIONS, re.DOTALL,
)  # fmt: skip
"""Name, parameters, and how it runs."""


def signature(name: str, parameters: str) -> str:
    kinds = [one.split()[1] for one in parameters.split(",") if one.strip()]
    return f"{name}({', '.join(kinds)})"


@pytest.mark.parametrize("call", schema.AGENT_CALLS)
def test_each_call_of_an_agent_is_there_with_these_parameters(call: str) -> None:
    assert call in {signature(name, parameters) for name, parameters, _ in MADE}


def test_no_function_finds_another_ones_tables_or_functions() -> None:
    assert len(MADE) == schema.FUNCTIONS.count("CREATE OR REPLACE FUNCTION")
    for name, _, runs in MADE:
        assert "SECURITY DEFINER" in runs, name
        assert "SET search_path = pg_catalog, vmckpt_lease, pg_temp" in runs, name


def test_what_is_made_is_nobodys_until_it_is_granted() -> None:
    last = schema.FUNCTIONS.rstrip().rpartition("\n")[2]
    assert last == "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA vmckpt_lease FROM PUBLIC;"
    assert "REVOKE ALL ON SCHEMA vmckpt_lease FROM PUBLIC;" in schema.TABLES
    assert schema.TABLES.rstrip().endswith(
        "REVOKE ALL ON ALL TABLES IN SCHEMA vmckpt_lease FROM PUBLIC;"
    )
    assert "GRANT" not in schema.TABLES + schema.FUNCTIONS


def test_an_upgrade_brings_the_columns_that_are_new() -> None:
    lease = schema.TABLES.partition("vmckpt_lease.lease (")[2].partition(") WITH")[0]
    added = re.findall(r"ADD COLUMN (\w+ \w+)", schema.UPGRADE)
    assert added
    assert all(column in lease for column in added)
