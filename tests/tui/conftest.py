"""The dashboard's tests run by the loop's clock: no second passes while nothing happens."""

import asyncio
from pathlib import Path

import pytest
from textual import _time, _wait

HERE = Path(__file__).parent
REAL = ("test_web.py", "test_web_browser.py")
"""They talk to other processes, which have clocks of their own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.path.name not in REAL:
            item.add_marker(pytest.mark.looptime)


@pytest.fixture(autouse=True)
def _the_loop_has_the_clock(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Textual's timers, and its waiting for the processor to be idle, by the loop's clock."""
    if request.path.name in REAL:
        return

    def now() -> float:
        return asyncio.get_running_loop().time()

    monkeypatch.setattr(_time, "get_time", now)
    monkeypatch.setattr(_wait, "monotonic", now)
