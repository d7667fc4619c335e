"""What a command loads before it does anything: no library that it may not need."""

import json
import subprocess
import sys
from typing import Any

import pytest

from vmckpt.cli.app import loaded
from vmckpt.cli.commands import places

# Loads what every command needs, then asks each command for its help in a fork of its own.
_PROGRAM = """
import io, json, os, sys
from vmckpt.cli import app
found = {}
for name in json.loads(sys.argv[1]):
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        sys.stdout = sys.stderr = io.StringIO()
        code = app.run([*name.split(), "--help"])
        tops = sorted({one.partition(".")[0] for one in sys.modules})
        ours = [one for one in sys.modules if one.startswith(("vmckpt.", "vmckpt_"))]
        told = json.dumps({"code": code, "tops": tops, "ours": ours, "all": len(sys.modules)})
        os.write(writes, told.encode())
        os._exit(0)
    os.close(writes)
    found[name] = json.loads(os.fdopen(reads).read())
    os.waitpid(child, 0)
print(json.dumps(found))
"""
HEAVY = {
    "textual", "boto3", "botocore", "aiohttp", "moto", "sqlalchemy", "libvirt", "numpy", "paramiko",
    "psycopg", "cryptography", "tenacity", "yaml",
}  # fmt: skip
"""Libraries that no help needs."""
NEEDED = {"watch": {"yaml"}, "lab": {"cryptography", "libvirt", "tenacity", "yaml"}}
"""Loaded all the same: the lab is imported as a whole, and watch with the journal."""
OURS = 40
"""Modules of vmckpt that a command's help may load; the most is 34, the lab's 61 aside."""
ALL = 460
"""Modules in all; the most is 413, the lab's 530 aside."""


_ACTS = {"cryptography", "libvirt", "paramiko", "tenacity", "yaml"}
SERVICES = {
    "fleet": {"libvirt", "tenacity", "yaml"},
    "migration": _ACTS,
    "protection": _ACTS,
    "snapshots": _ACTS | {"numpy"},
    "snapshot_restore": _ACTS | {"numpy"},
}
"""Libraries that a service loads before it queries hosts. SQLAlchemy is loaded meanwhile."""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    told = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(["", *places()])],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found: dict[str, Any] = json.loads(told)
    return found


@pytest.mark.parametrize("name", ["", *places()])
def test_help_loads_nothing_that_only_the_command_needs(name: str, seen: dict[str, Any]) -> None:
    one = seen[name]
    assert one["code"] == 0
    assert HEAVY & set(one["tops"]) == NEEDED.get(name, set())
    assert name == "lab" or (len(one["ours"]) <= OURS and one["all"] <= ALL)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_loads_no_library_that_it_does_not_use(name: str) -> None:
    code = f"import sys, vmckpt.app.{name}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    tops = {one.partition(".")[0] for one in loaded.split()}

    assert HEAVY & tops == SERVICES[name]


@pytest.mark.parametrize("name", places())
def test_the_table_says_what_the_command_says(name: str) -> None:
    first = " ".join((loaded(name, places()[name]).help or "").split("\n\n")[0].split())
    assert (first.partition(". ")[0] + ".").replace("..", ".") == _ended(places()[name].says)


def _ended(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
