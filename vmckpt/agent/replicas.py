"""Orders about protections: short ones, which start, ask and end the agents that stay."""

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vmckpt.agent import afterlife, guarded
from vmckpt.agent.replica_backup import PORT
from vmckpt.agent.talk import Talk
from vmckpt.checkpoint import guestmemory, outputs, settings, userfault
from vmckpt.checkpoint.settings import IGNORE_SHARED
from vmckpt.errors import BadInput, CannotCapture, RemoteError, VmckptError
from vmckpt.hypervisor import blocks, pulling
from vmckpt.hypervisor import standby as libvirt_side
from vmckpt.hypervisor.monitor import Monitor
from vmckpt.replicate import control, guard, link, standing
from vmckpt.replicate.facts import Session, folder_of
from vmckpt.replicate.guardpage import GuardPage, process_of
from vmckpt.units import Seconds

_STARTS = Seconds(30.0)
_ENDS = Seconds(30.0)
_TURN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOrder:
    """One of them."""

    what: str
    """A key of WHAT."""
    guest: str
    uri: str
    host: str
    session: Mapping[str, Any] | None = None
    """As Session's JSON."""
    xml: str = ""
    peer: str = ""
    """The other agent's certificate."""
    wish: str | None = None

    def as_json(self) -> dict[str, Any]:
        """With the lease's password: for the host, and for no log or journal."""
        return {**asdict(self), "do": "replica"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "ReplicaOrder":
        """Raises KeyError, TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})

    @property
    def folder(self) -> Path:
        return folder_of(self.guest)


def carry_out(order: ReplicaOrder, talk: Talk) -> dict[str, Any]:
    """Raises VmckptError."""
    del talk
    if order.what not in _WHAT:
        raise BadInput(f"an order that is not known: {order.what!r}", mend="update vmckpt there")
    return _WHAT[order.what](order)


def _identity(order: ReplicaOrder) -> dict[str, Any]:
    """A certificate for the session; nothing of an earlier one may be there."""
    _must_be_free(order)
    order.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    return {
        "certificate": link.make_identity(order.folder),
        "owner": pulling.owner(order.uri, order.host),
    }


def _must_be_free(order: ReplicaOrder) -> None:
    session = Session.read(order.folder)
    if session is not None and not (order.folder / afterlife.OUTCOME).exists():
        raise BadInput(
            f"{session.name} is protected already, from or to {order.host}",
            mend=f"run vmckpt unprotect {session.name} first",
        )
    shutil.rmtree(order.folder, ignore_errors=True)


def _look(order: ReplicaOrder) -> dict[str, Any]:
    """All that a protection must know of a running guest. Raises CannotCapture."""
    with Monitor(order.guest, host=order.host, uri=order.uri) as monitor:
        process = userfault.find_process(order.guest)
        if process is None:
            raise CannotCapture(f"{monitor.name} has no QEMU process on {order.host}")
        files = guestmemory.files(monitor, process)
        held = outputs.look(monitor)
        undo = settings.look(monitor, want=IGNORE_SHARED, runs=True, folder=None)
        described = monitor.described()
        known = monitor.on_domain("looking at its disks", blocks.nodes)
        disks = blocks.read_facts(described, known)
        stored = libvirt_side.stored(monitor)
        return {
            "name": monitor.name, "undo": undo.to_json(), "cards": held.cards,
            "memory": [file.size for file in files], "xml": monitor.xml(),
            "definition": stored[0] if stored else "", "autostart": bool(stored and stored[1]),
            "qemu": monitor.qemu_version(), "disks": [asdict(disk) for disk in disks],
        }  # fmt: skip


def _stand(order: ReplicaOrder) -> dict[str, Any]:
    """Make the standby and start its agent; where it listens."""
    session = _session(order)
    (order.folder / link.PEER).write_text(order.peer)
    session.write(order.folder)
    try:
        standing.make(session, order.xml)
        _start(order.folder)
        give_up = time.monotonic() + _STARTS
        while not _answers(order.folder):
            if time.monotonic() > give_up:
                raise RemoteError(f"{order.host}: the standby's agent does not start{_why(order)}")
            time.sleep(_TURN)
        return {"port": int((order.folder / PORT).read_text())}
    except BaseException:
        with suppress(VmckptError):
            _stop_agent(order.folder)
            standing.remove(session, order.folder)
        raise


def _protect(order: ReplicaOrder) -> dict[str, Any]:
    """Start the primary's agent."""
    session = _session(order)
    (order.folder / link.PEER).write_text(order.peer)
    session.write(order.folder)
    _start(order.folder)
    give_up = time.monotonic() + _STARTS
    while not _answers(order.folder):
        if time.monotonic() > give_up:
            raise RemoteError(f"{order.host}: the guest's agent does not start{_why(order)}")
        time.sleep(_TURN)
    return {}


def _ask(order: ReplicaOrder) -> dict[str, Any]:
    """What the agent says; what it left if there is none."""
    folder = order.folder
    try:
        session = Session.read(folder)
    except BadInput:
        session = None
    if session is None:
        return {"role": None}
    told = {"role": session.role, "session": session.session, "peer": session.peer,
            "name": session.name, "guest": session.guest, "host": session.host}  # fmt: skip
    with suppress(OSError, ValueError):
        told |= json.loads((folder / afterlife.OUTCOME).read_text())
    question = {} if order.wish is None else {"wish": order.wish}
    try:
        return {**told, **control.ask(folder, question), "agent": True}
    except RemoteError as exc:
        if order.wish is not None and "outcome" not in told:
            raise
        return {**told, "agent": False, "says": exc.message}


def _end(order: ReplicaOrder) -> dict[str, Any]:
    """See that nothing of a protection is left on this host; may be repeated."""
    session = Session.read(order.folder)
    if session is None:
        shutil.rmtree(order.folder, ignore_errors=True)
        return {"did": []}
    _stop_agent(order.folder)
    if session.role == "backup":
        if (order.folder / afterlife.OUTCOME).exists():
            standing.clear(session, order.folder)
            return {"did": []}
        return {"did": list(standing.remove(session, order.folder))}
    if userfault.find_process(session.guest) is None:
        afterlife.forget(session, order.folder)
        return {"did": ["removed what was left of the protection"]}
    with Monitor(order.guest, host=order.host, uri=order.uri) as monitor:
        afterlife.unprotect(session, order.folder, monitor)
    return {"did": ["let the guest's output out", "ended its mirrors"]}


def _session(order: ReplicaOrder) -> Session:
    if order.session is None:
        raise BadInput("an order without a session")
    return Session.from_json(order.session)


def _start(folder: Path) -> None:
    with (folder / guard.AGENT_LOG).open("ab") as log:
        subprocess.run(
            ["setsid", "--fork", *guarded.command(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", check=True,
        )  # fmt: skip


def _answers(folder: Path) -> bool:
    try:
        control.ask(folder, {})
    except RemoteError:
        return False
    return True


def _why(order: ReplicaOrder) -> str:
    with suppress(OSError, IndexError):
        text = (order.folder / guard.AGENT_LOG).read_text(errors="replace")
        return f": {text.strip().splitlines()[-1]}"
    return ""


def _stop_agent(folder: Path) -> None:
    """End the agent of a folder for good, by force: all it knows is written down."""
    (folder / guard.OVER).touch()
    with suppress(OSError, ValueError):
        page = GuardPage.open(folder / guarded.PAGE)
        process = process_of(page.agent)
        page.close()
        if str(folder).encode() in Path(f"/proc/{process}/cmdline").read_bytes():
            afterlife.kill(process, _ENDS)


_WHAT = {
    "ask": _ask,
    "end": _end,
    "identity": _identity,
    "look": _look,
    "protect": _protect,
    "stand": _stand,
}
