"""A pytest plugin: writes down which test runs and which one fails, line by line as JSON.

It stands alone: the runner copies it beside the scratch copy and names the file to write to and the
copy whose vmckpt must be imported in the environment.
"""

import importlib
import json
import os
from pathlib import Path

import pytest

OTHER_CODE = 99
"""Exit code: another vmckpt than the mutated one was imported."""


def _write(**told: str) -> None:
    with Path(os.environ["VMCKPT_WATCHER_FILE"]).open("a") as file:
        file.write(json.dumps(told) + "\n")


def pytest_collection_finish() -> None:
    """The tests have imported what they will run."""
    copy = Path(os.environ["VMCKPT_WATCHER_COPY"])
    file = importlib.import_module("vmckpt").__file__ or "vmckpt"
    if not Path(file).resolve().is_relative_to(copy.resolve()):
        pytest.exit(f"{file} is not in {copy}", returncode=OTHER_CODE)


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _write(began=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test, or what it needs before or after it, has ended."""
    if report.failed:
        _write(failed=report.nodeid)
