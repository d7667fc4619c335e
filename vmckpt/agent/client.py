"""The controller's side of an agent: install the agent on a host if needed, and send orders."""

import asyncio
import logging
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakKeyDictionary

from vmckpt import __version__
from vmckpt.agent import bundle, results
from vmckpt.agent.protocol import error_from_json
from vmckpt.errors import RemoteError
from vmckpt.model.events import Copied, Emit
from vmckpt.model.host import ADD_SSH, Host
from vmckpt.remote import agent_install
from vmckpt.remote.agent_channel import AgentProcess
from vmckpt.remote.agent_install import HostPython, Parcel
from vmckpt.remote.shell_files import PROGRAMS
from vmckpt.remote.ssh import Remote
from vmckpt.units import Bytes, Seconds, show_bytes

LIBVIRT = "qemu:///system"
"""The libvirt URI that an agent uses on its own host."""
_NAME = "vmckpt-agent"
_MODULE = ("-P", "-m", "vmckpt.agent.main")
"""With -P, Python imports no modules from the current directory, which is arbitrary."""
log = logging.getLogger("vmckpt.installing")
# Always shown: over a slow link, the installation delays the first order by a minute.
log.setLevel(logging.INFO)
# Prints the path of an installed agent of our version. Otherwise prints the path of this process's
# Python interpreter, if the same path on the host has vmckpt and is safe. The path is safe if the
# host is this machine, or if no other user of the host can have created the file. The script is
# read from standard input.
_FIND = (
    PROGRAMS
    + r"""
if path=$(command -v vmckpt-agent) && [ "$("$path" --version </dev/null 2>/dev/null)" = "$2" ]
then echo "$path"; exit 0; fi
say='from importlib import import_module as get
from vmckpt.agent import bundle
for name in bundle.MODULES: get(name)
print(bundle.vmckpt.__version__)'
[ -x "$1" ] || exit 1
[ "$(cat /proc/sys/kernel/random/boot_id)" = "$3" ] || ours "$1" || exit 1
[ "$("$1" -P -c "$say" </dev/null 2>/dev/null)" = "$2" ] && echo "$1"
"""
)
# Carries out an order: passes the session to the agent that waits on the host, or starts an agent,
# which then waits for further orders. Reports to the controller if there is no agent.
# $1: the relay's text; $2: our version; $3, $4: our interpreter and boot ID, as for _FIND;
# $5: seconds to wait; $6: the key of our interpreter's agent; $7, $8: launcher and key of an
# installed bundle, or empty.
_START = (
    PROGRAMS
    + r"""
if [ "$(id -u)" = 0 ] && python=$(command -v python3); then
    "$python" -I -S -c "$1" "installed $2" "$6" ${8:+"$8"}
    status=$?; [ "$status" = 75 ] || exit "$status"
fi
[ -z "$7" ] || exec "$7" --wait "$8" "$5"
if path=$(command -v vmckpt-agent) && [ "$("$path" --version </dev/null 2>/dev/null)" = "$2" ]
then exec "$path" --wait "installed $2" "$5"; fi
if [ -x "$3" ] && { [ "$(cat /proc/sys/kernel/random/boot_id)" = "$4" ] || ours "$3"; } &&
    [ "$("$3" -P -c 'import vmckpt; print(vmckpt.__version__)' </dev/null 2>/dev/null)" = "$2" ]
then exec "$3" -P -m vmckpt.agent.main --wait "$6" "$5" --whole; fi
echo '{"absent":true}'
"""
)
_WAITS = Seconds(300.0)
"""How long an agent waits on a host for the next order."""
_installing: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]]
_installing = WeakKeyDictionary()
"""A lock per host, so that concurrent orders install the agent only once."""
_FRESH = Seconds(60.0)
_known: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, tuple[float, str]]]
_known = WeakKeyDictionary()
"""By host: when a bundle of the agent was last found there, and the path of its launcher."""
_logins: ContextVar[dict[str, Remote] | None] = ContextVar("logins", default=None)
"""The logins of the innermost `shared_logins`, by host."""


def _words(host: Host) -> tuple[str, ...]:
    """Return the command that carries out an order on a host.

    The command includes the path of an agent that was found there recently, if any.
    """
    found = _known.setdefault(asyncio.get_running_loop(), {})
    at, launcher = found.get(host.name, (-_FRESH, ""))
    if time.monotonic() - at >= _FRESH:
        launcher = ""
    return _start(launcher)


def _start(launcher: str) -> tuple[str, ...]:
    here = sys.executable
    return (
        "sh", "-c", _START, _NAME, _relay(), __version__, here, _boot(), f"{_WAITS:g}",
        f"{here} {__version__}", launcher, launcher,
    )  # fmt: skip


@cache
def _relay() -> str:
    return resources.files("vmckpt.remote.scripts").joinpath("relay_order.py").read_text()


@asynccontextmanager
async def shared_logins(*hosts: Host) -> AsyncIterator[None]:
    """Within the block, let all orders to a host use one ssh login.

    The logins to `hosts` are opened immediately, the others at the first order.
    """
    logins = {host.name: Remote(host) for host in hosts if host.ssh is not None}
    opening = [asyncio.create_task(one.open()) for one in logins.values()]
    outer = _logins.set(logins)
    try:
        yield
    finally:
        _logins.reset(outer)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)  # an order reports the error
        for one in logins.values():
            await one.__aexit__()


@asynccontextmanager
async def _login(host: Host, given: Remote | None) -> AsyncIterator[Remote]:
    """Yield `given`, the shared login to a host, or a login that is closed after the block."""
    shared = _logins.get()
    if given is not None:
        yield given
    elif shared is not None:
        yield shared.setdefault(host.name, Remote(host))
    else:
        async with Remote(host) as own:
            yield own


async def _brought(host: Host, remote: Remote | None, *, install: bool) -> tuple[str, ...]:
    """Return the command that carries out an order on a host where no agent was found at first.

    `install`: whether to install the agent if it is missing. Raises RemoteError.
    """
    launcher, *more = await ensure_agent(host, remote, install=install)
    found = _known.setdefault(asyncio.get_running_loop(), {})
    found[host.name] = (time.monotonic(), launcher)
    return _start("" if more else launcher)


async def ensure_agent(
    host: Host, remote: Remote | None = None, *, install: bool = True
) -> tuple[str, ...]:
    """Return the command that starts an agent on a host; install the agent if necessary.

    `remote`: a login to use; None: a shared or new login. Raises RemoteError if the host has no
    agent and, with `install`, none can be installed.
    """
    if host.ssh is None:
        return _here(host)
    async with _login(host, remote) as line:
        if (found := await _found(line)) is not None:
            return found
        return (await _installed(line, install=install),)


async def require_agent(host: Host) -> None:
    """Check that a host has an agent, or that the agent can be installed. Changes nothing.

    Raises RemoteError if neither is the case.
    """
    if host.ssh is None:
        _here(host)
        return
    async with Remote(host) as remote:
        if await _found(remote) is None:
            _, python = await _inspected(remote)
            if python is not None and host.read_only:
                raise _untouched(host)


def _untouched(host: Host) -> RemoteError:
    return RemoteError(
        f"{host.name}: vmckpt-agent is not installed, and read-only mode forbids its installation",
        host=host.name,
        hint=agent_install.BY_HAND,
    )


def _here(host: Host) -> tuple[str, ...]:
    if not host.uri.startswith("qemu:///"):
        raise RemoteError(
            f"{host.name}: the host has no ssh address and is not this machine",
            host=host.name,
            hint=ADD_SSH,
        )
    found = shutil.which(_NAME)
    return (found,) if found else (sys.executable, *_MODULE)


async def _found(remote: Remote) -> tuple[str, ...] | None:
    words = [sys.executable, __version__, _boot()]
    told = await remote.run(["sh", "-s", "--", *words], text=_FIND)
    path = told.out.strip()
    if told.status != 0 or not path.startswith("/"):
        return None
    return (path,) if PurePosixPath(path).name == _NAME else (path, *_MODULE)


def _boot() -> str:
    """Return the boot ID of this machine, which no other machine shares."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def _installed(remote: Remote, *, install: bool) -> str:
    """Install this controller's bundle on a host unless it is installed.

    Returns the launcher's path. Raises RemoteError, also if the bundle is missing without
    `install`.
    """
    host = remote.host
    locks = _installing.setdefault(asyncio.get_running_loop(), {})
    async with locks.setdefault(host.name, asyncio.Lock()):
        made, python = await _inspected(remote)
        parcel = _parcel(host, made)
        if python is None:
            return parcel.launcher
        if not install:
            raise RemoteError(f"{host.name}: vmckpt-agent is not installed", host=host.name)
        if host.read_only:
            raise _untouched(host)
        try:
            path = await asyncio.to_thread(bundle.archive, made)
            size = Bytes(path.stat().st_size)
        except OSError as exc:
            raise _not_made(host, exc) from exc
        log.info("installing the agent on %s (%s)", host.name, show_bytes(size))
        try:
            await agent_install.install(remote, parcel, python.path, path)
        except RemoteError:
            bundle.forget(path)
            raise
        return parcel.launcher


async def _inspected(remote: Remote) -> tuple[bundle.Bundle, HostPython | None]:
    """Return the bundle for a host, and the Python to install it with; None if it is installed.

    Raises RemoteError.
    """
    host = remote.host
    made = await _bundle(host, agent_install.OURS)
    python = await agent_install.inspect_agent(remote, _parcel(host, made), bundle.pythons())
    if python is not None and python.tag != made.python:
        made = await _bundle(host, python.tag)
        python = await agent_install.inspect_agent(remote, _parcel(host, made), (python.tag,))
    return made, python


async def _bundle(host: Host, python: str) -> bundle.Bundle:
    try:
        return await asyncio.to_thread(bundle.for_python, python)
    except OSError as exc:
        raise _not_made(host, exc) from exc


def _not_made(host: Host, exc: OSError) -> RemoteError:
    where = f"{exc.filename}: " if exc.filename else ""
    return RemoteError(
        f"{host.name}: vmckpt-agent is not installed and cannot be sent:"
        f" {where}{exc.strerror or exc}",
        host=host.name,
        hint="make vmckpt's files readable and its state directory writable on this machine",
    )


def _parcel(host: Host, made: bundle.Bundle) -> Parcel:
    return Parcel(
        # Next to the agent's state directory, which is also on disk.
        folder=f"{host.agent_state.rstrip('/')}-versions", name=made.name, digest=made.digest,
        unpacked=made.size, modules=bundle.MODULES,
    )  # fmt: skip


Answer = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""A function that answers an agent's request, given the request's name and arguments."""


async def _nothing(_: str, __: Mapping[str, Any]) -> dict[str, Any]:
    return {"refused": "this order does not permit requests"}


async def run_order(
    host: Host,
    order: Mapping[str, Any],
    emit: Emit,
    stop: asyncio.Event,
    answer: Answer = _nothing,
    *,
    remote: Remote | None = None,
    install: bool = True,
) -> dict[str, Any]:
    """Have an agent on `host` carry out an order. Returns the agent's result.

    `answer` answers the agent's requests; setting `stop` asks the agent to stop. `remote`: a login
    to use; None: the order opens its own, unless logins are shared. `install`: whether to install
    the agent if the host has none.

    Raises the error that the agent reports. Raises RemoteError if there is no agent, or if the
    agent exits without a result or sends an invalid message; it is then unknown how much of the
    order was carried out.
    """
    if host.ssh is None:
        done = await _Exchange(host, order, emit, stop, answer, None).attempt(_here(host))
    else:
        async with _login(host, remote) as line:
            asks = _Exchange(host, order, emit, stop, answer, line)
            done = await asks.attempt(_words(host))
            if done is None:
                done = await asks.attempt(await _brought(host, line, install=install))
    if done is None:
        raise RemoteError(
            f"{host.name}: vmckpt-agent did not start",
            host=host.name,
            hint=f"run vmckpt doctor {host.name}",
        )
    return done


@dataclass(frozen=True)
class _Exchange:
    """An order, and what to do with the agent's messages."""

    host: Host
    order: Mapping[str, Any]
    emit: Emit
    stop: asyncio.Event
    answer: Answer
    remote: Remote | None

    async def attempt(self, words: Sequence[str]) -> dict[str, Any] | None:
        """Have the agent that `words` starts carry out the order.

        Returns the agent's result; None if the host has no agent. Raises the error that
        the agent reports, and RemoteError.
        """
        async with AgentProcess(self.host, words, self.remote) as agent:
            await agent.send(self.order)
            stopping = asyncio.create_task(_pass_on(self.stop, agent))
            try:
                while True:
                    told = await agent.receive()
                    with sensible(self.host):
                        if "done" in told:
                            return _mapping(told["done"])
                        if "error" in told:
                            raise error_from_json(_mapping(told["error"]), self.host.name)
                        if "absent" in told:
                            return None
                        if "ask" in told:
                            about = _mapping(told.get("about", {}))
                            await agent.send(await self.answer(str(told["ask"]), about))
                        elif "progress" in told:
                            self.emit(_copied(_mapping(told["progress"])))
            finally:
                stopping.cancel()


@contextmanager
def sensible(host: Host) -> Iterator[None]:
    """Wrap the parsing of an agent's message, since a host may send anything.

    Raises RemoteError if the message is invalid.
    """
    try:
        yield
    except (
        TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
    ) as exc:  # fmt: skip
        why = str(exc)[:80]
        raise RemoteError(
            f"{host.name}: invalid message from vmckpt-agent: {why!r}",
            host=host.name,
            hint=f"install the controller's version of vmckpt on {host.name}; run vmckpt doctor"
            f" {host.name}",
        ) from exc


def _mapping(told: object) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise TypeError(f"expected a JSON object, not {str(told)[:40]!r}")
    return told


async def _pass_on(stop: asyncio.Event, agent: AgentProcess) -> None:
    await stop.wait()
    with suppress(RemoteError):
        await agent.send({"stop": True})


def _copied(told: Mapping[str, Any]) -> Copied:
    total = told.get("total")
    return Copied(
        phase=str(told.get("phase"))[: results.TEXT],
        done=results.size(told.get("done", 0)),
        total=None if total is None else results.size(total),
        new=results.size(told.get("new", 0)),
    )
