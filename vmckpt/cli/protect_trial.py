"""What vmckpt shows of a copy that runs for a test."""

import time
from typing import TYPE_CHECKING, Any

from vmckpt.cli import output
from vmckpt.units import show_seconds

if TYPE_CHECKING:
    from vmckpt.protection.test_failover import Tested


def show(done: "Tested", *, runs: bool, json: bool) -> None:
    """A copy that runs, or has ended."""
    if json:
        output.print_json({**done.as_json(), "runs": runs})
        return
    took = show_seconds(done.took)
    if not runs:
        output.out.print(f"nothing of {done.name} is left on {done.host}; took {took}")
        return
    old = "" if done.age is None else f", {show_seconds(done.age)} old by then"
    output.out.print(
        f"{done.name} runs on {done.host}: a copy of {done.guest}, epoch {done.epoch}{old}, without"
        f" network; took {took}"
    )
    output.out.print(f"look at it: {' or '.join(done.look)}")
    output.out.print(f"end it: {' or '.join(done.end)}")


def line(test: dict[str, Any]) -> str:
    """The same in a protection's status."""
    name = test.get("name") or "a copy"
    if test["state"] == "failed":
        return f"{name} failed: {test['why']}"
    if test["state"] == "copying":
        return f"{name} is made, for {show_seconds(time.time() - test['begun'])}"
    since = show_seconds(time.time() - test["since"])
    return f"{name} runs, a copy of epoch {test['epoch']}, for {since}"
