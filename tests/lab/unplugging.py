"""Processes that die between the two halves of the replacement of a network card.

    python -m tests.lab.unplugging agent                    inside a lab host, as its agent
    python -m tests.lab.unplugging controller GUEST AGENT   as a controller; AGENT: starts its agent

The agent is killed when the guest has released the card, the controller when its agent has died.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from vmckpt import inventory
from vmckpt.agent import client, main, network_cards
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.snapshot import prepare


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_agent() -> None:
    mock.patch.object(network_cards, "_plug_in", die).start()
    sys.exit(main.carry_out_one())


async def be_controller(guest: str, agent: Sequence[str]) -> None:
    known = inventory.load(Path(os.environ["VMCKPT_INVENTORY"]))
    usual = client.run_order

    async def run_order(on: Host, order: Mapping[str, Any], *more: Any) -> dict[str, Any]:
        if order.get("what") != "replace":
            return await usual(on, order, *more)
        started = await asyncio.create_subprocess_exec(*agent, stdin=subprocess.PIPE)
        assert started.stdin is not None
        started.stdin.write(f"{json.dumps(order)}\n".encode())
        await started.wait()  # its input stays open: an agent without a controller unplugs nothing
        die()
        return {}

    caller = Caller(emit=lambda _: None, warn=print, stop=asyncio.Event())
    with mock.patch.object(client, "run_order", run_order):
        await prepare.make_ready(known.host("alpha"), guest, caller, live=True)


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        be_agent()
    asyncio.run(be_controller(sys.argv[2], sys.argv[3:]))
