"""A pytest plugin that records which tests start and which fail, as lines of JSON.

The plugin needs no other module: the runner copies it next to the copy of the tree. Environment
variables name the file to write to, and the copy from which vmckpt must be imported.
"""

import importlib
import json
import os
from pathlib import Path

import pytest

OTHER_CODE = 99
"""Exit code: a vmckpt other than the mutated one was imported."""


def _write(**told: str) -> None:
    with Path(os.environ["VMCKPT_WATCHER_FILE"]).open("a") as file:
        file.write(json.dumps(told) + "\n")


def pytest_collection_finish() -> None:
    """Check that the tests have imported the vmckpt of the copy."""
    copy = Path(os.environ["VMCKPT_WATCHER_COPY"])
    file = importlib.import_module("vmckpt").__file__ or "vmckpt"
    if not Path(file).resolve().is_relative_to(copy.resolve()):
        pytest.exit(f"{file} is not in {copy}", returncode=OTHER_CODE)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record that a test starts."""
    _write(began=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a failure of a test, or of its setup or teardown."""
    if report.failed:
        _write(failed=report.nodeid)
