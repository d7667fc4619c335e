"""Run one vmckpt command and record when each of its phases began and ended.

    python -m bench.command_phases FILE WORD...

Runs `vmckpt WORD...` in this process, and writes the phases to FILE as JSON: for each, its name,
its start in seconds since the process started, and its length in seconds. Phases may overlap,
since a command talks to several hosts at a time.
"""

import functools
import inspect
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_began = time.time() - time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
_phases: list[tuple[str, float, float]] = []


def _note(name: str, began: float) -> None:
    _phases.append((name, began - _began, time.time() - began))


def _timed(holder: Any, name: str, label: Callable[..., str]) -> None:
    """Replace a function by one that also records how long each call takes."""
    inner = getattr(holder, name)
    if inspect.iscoroutinefunction(inner):

        @functools.wraps(inner)
        async def awaited(*args: Any, **more: Any) -> Any:
            began = time.time()
            try:
                return await inner(*args, **more)
            finally:
                _note(label(*args, **more), began)

        setattr(holder, name, awaited)
        return

    @functools.wraps(inner)
    def called(*args: Any, **more: Any) -> Any:
        began = time.time()
        try:
            return inner(*args, **more)
        finally:
            _note(label(*args, **more), began)

    setattr(holder, name, called)


def _record() -> None:
    """Time the calls that reach a host, a store or the journal."""
    client = import_module("vmckpt.agent.client")
    connection = import_module("vmckpt.hypervisor.connection")
    agent_channel, ssh = (import_module(f"vmckpt.remote.{one}") for one in ("agent_channel", "ssh"))

    _timed(ssh.Remote, "_connect", lambda remote: f"login {remote.host.name}")
    _timed(
        ssh.Remote, "run",
        lambda remote, args, **_: f"run {remote.host.name} {args[0]} {args[-1][:20]}",
    )  # fmt: skip
    _timed(agent_channel.AgentProcess, "__aenter__", lambda agent: f"start agent {agent.host.name}")
    _timed(
        agent_channel.AgentProcess, "__aexit__", lambda agent, *_: f"end agent {agent.host.name}"
    )
    _timed(client, "ensure_agent", lambda host, *_, **__: f"find agent {host.name}")
    _timed(
        client, "run_order",
        lambda host, order, *_, **__: f"order {host.name} {order['do']} {order.get('what', '')}",
    )  # fmt: skip
    for name in ("Hypervisor",):
        _timed(
            getattr(connection, name), "__aenter__",
            lambda hypervisor: f"libvirt {hypervisor.host.name}",
        )  # fmt: skip


def main() -> None:
    """Run the command, and write its phases."""
    file, words = Path(sys.argv[1]), sys.argv[2:]
    app = import_module("vmckpt.cli.app")
    _note("imports of the command line", _began)
    _record()
    _note("imports of connections", _began)
    try:
        code = app.run(words)
    finally:
        _phases.append(("whole command", 0.0, time.time() - _began))
        file.write_text(json.dumps(sorted(_phases, key=lambda one: one[1])))
    sys.exit(code)


if __name__ == "__main__":
    main()
