import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import settings

from tests.support import following, hint_situations, schemas
from vmckpt.cli import output
from vmckpt.journal import systemd_log
from vmckpt_lab import lab

# By the clock an example takes as long as whoever has the cores leaves it.
settings.register_profile("vmckpt", deadline=None)
settings.load_profile("vmckpt")

# Of a shell's background, or under nohup, what tests start would ignore these for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Operations of tests do not belong in this machine's log. Processes that tests start inherit this.
os.environ[systemd_log.VARIABLE] = "none"

# A process builds its commands once, but here thousands of them run in one process.
for _name in ("get_command", "get_group"):
    setattr(typer.main, _name, cache(getattr(typer.main, _name)))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules and test items, which stay until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Verify that a test has run the hints that the list says it runs."""
    following.taken.clear()
    yield
    if "VMCKPT_HINTS" in os.environ:
        with Path(os.environ["VMCKPT_HINTS"]).open("a") as log:
            log.writelines(f"{item.nodeid}\t{text}\n" for text in sorted(following.taken))
    assert hint_situations.promised(item.nodeid) <= following.taken


_workers: set[str] = set()
"""Process numbers of this process's children: those that run tests for it are among them."""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready() -> None:
    for each in Path("/proc/self/task").glob("*/children"):
        _workers.update(each.read_text().split())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: the summary comes when all tests of a kind have ended."""
    if report.failed:
        why = (report.longreprtext.splitlines() or [""])[-1]
        sys.stdout.write(f"\nFAILED {report.nodeid} ({report.when}): {why}\n")
        sys.stdout.flush()


def pytest_unconfigure() -> None:
    """Remove the labs of workers of this run that ended before they could, as after a SIGINT to
    this process. A test lab's name ends with the number of the process that made it; labs of other
    runs and of people are left alone."""
    for name in lab.names() if _workers else ():
        made = re.fullmatch(r"[a-z]+(\d+)", name)
        if made is not None and made[1] in _workers and not Path("/proc", made[1]).exists():
            lab.down(name)


@pytest.fixture(autouse=True)
def _no_error_of_libvirts_is_left() -> None:
    """libvirt remembers the last one of a thread, and `libvirtError("refused")`, which fakes raise,
    takes that for its message."""
    if (libvirt := sys.modules.get("libvirt")) is not None:
        libvirt.virResetLastError()


@pytest.fixture(autouse=True)
def _what_is_printed_as_json_has_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of commands that run in this process; Bench looks at those that do not."""
    write = output.print_json

    def checked(value: Any, *, line: bool = False) -> None:
        schemas.held(schemas.running(), value)
        write(value, line=line)

    monkeypatch.setattr(output, "print_json", checked)
