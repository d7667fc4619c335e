"""What snapshots need: of a host, and of the controller. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vmckpt.model.finding import Finding, Severity
from vmckpt.units import MIB, Bytes, show_bytes

_LEAST = 2048 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReady:
    """What one host has for snapshots."""

    name: str
    agent: str | None
    """Why no agent can be started there; None: one can."""
    state: str
    """The folder in which captured memory lies until it is stored."""
    room: Bytes | None
    """Free below it; None: it cannot be made there."""
    stores: Mapping[str, str | None]
    """By store that is a folder: why agents cannot write there; None: they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReady:
    """What a store is like from the controller."""

    wrong: str | None = None
    """Why it cannot be used; None: it can."""
    mend: str | None = None
    tried: bool = True
    """It was tried whether what is there stays there, which locks depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReady:
    """What the controller has for snapshots."""

    stores: Mapping[str, StoreReady]
    admins: Sequence[str]
    """For whom snapshots are encrypted."""
    keys: str | None
    """Why the keys cannot be read; None: they can."""


def of_host(ready: HostReady) -> Iterator[Finding]:
    """Findings about a host."""
    yield _finding(
        "snapshot-agent", ready.name, ready.agent or "an agent can be started", ready.agent,
        "install it there by hand: docs/hosts.md, The agent",
    )  # fmt: skip
    yield _room(ready)
    for store, why in ready.stores.items():
        yield _finding(
            "snapshot-store", ready.name, f"store {store}: {why or 'can be written'}", why,
            f"mount it on {ready.name} under the path that hosts.yaml names, for writing",
        )  # fmt: skip


def of_controller(ready: ControllerReady) -> Iterator[Finding]:
    """Findings about the controller."""
    where = "controller"
    for store, seen in ready.stores.items():
        text = seen.wrong or "can be opened" + (", and its locks hold" if seen.tried else "")
        yield _finding(
            "snapshot-store", where, f"store {store}: {text}", seen.wrong,
            seen.mend or "vmckpt snapshot init makes a new one; else see its place in hosts.yaml",
        )  # fmt: skip
    if ready.keys is not None:
        yield _finding(
            "snapshot-keys", where, ready.keys, ready.keys, "vmckpt snapshot keys list tells more"
        )
        return
    open_ = None if ready.admins else "snapshots are not encrypted"
    names = ", ".join(ready.admins)
    yield _finding(
        "snapshot-keys", where, open_ or f"snapshots are encrypted for {names}", open_,
        "vmckpt snapshot keys new FILE, then vmckpt snapshot keys add NAME KEY",
    )  # fmt: skip


def _room(ready: HostReady) -> Finding:
    mend = "free some room, or name another folder with agent_state in hosts.yaml"
    if ready.room is None:
        why = f"{ready.state} cannot be made"
        return _finding("snapshot-room", ready.name, why, why, mend)
    short = "; a capture lays down a guest's memory" if ready.room < _LEAST else None
    text = f"{ready.state}: {show_bytes(ready.room)} free{short or ''}"
    return _finding("snapshot-room", ready.name, text, short, mend)


def _finding(code: str, where: str, text: str, wrong: str | None, mend: str) -> Finding:
    return Finding(
        code=code, severity=Severity.OK if wrong is None else Severity.WARNING, where=where,
        text=text, mend=None if wrong is None else mend,
    )  # fmt: skip
