"""The guard of a keeper, which replaces a keeper that was killed."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmckpt.agent.restore import keeper_guard


@pytest.fixture
def keeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The orders of the keepers that were started; the second one finishes."""
    orders: list[str] = []

    def run(words: list[str], *, input: str, **_: object) -> None:  # noqa: A002 - as in subprocess
        assert words == [sys.executable, "-P", "-m", "vmckpt.agent.main"]
        orders.append(input)
        if len(orders) == 2:
            (tmp_path / "order.json").unlink()

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(keeper_guard, "_AGAIN", 0.01)
    return orders


def guarding(order: Path, keeper: "subprocess.Popen[bytes]") -> threading.Thread:
    thread = threading.Thread(target=keeper_guard.guard, args=(order, keeper.pid), daemon=True)
    thread.start()
    return thread


def test_keepers_are_started_until_one_has_finished(
    tmp_path: Path, keeper: "subprocess.Popen[bytes]", started: list[str]
) -> None:
    order = tmp_path / "order.json"
    order.write_text('{"do":"serve"}')
    thread = guarding(order, keeper)
    thread.join(0.3)
    assert thread.is_alive()
    assert started == []
    keeper.kill()
    thread.join(5.0)
    assert not thread.is_alive()
    assert started == ['{"do":"serve"}\n'] * 2


@pytest.mark.parametrize("left", ["nothing", "a failure"])
def test_a_keeper_that_has_finished_or_failed_is_not_replaced(
    tmp_path: Path, keeper: "subprocess.Popen[bytes]", started: list[str], left: str
) -> None:
    if left == "a failure":
        (tmp_path / "order.json").write_text("{}")
        (tmp_path / keeper_guard.FAILED).touch()
    keeper.kill()
    keeper.wait()
    keeper_guard.guard(tmp_path / "order.json", keeper.pid)
    assert started == []
