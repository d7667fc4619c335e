"""Orders about protections: short ones, which start, ask and end the agents that stay."""

import json
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vmckpt.agent.orders import ReplicaOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.replication import (
    handover,
    mirrors,
    queries,
    teardown,
    test_failover_files,
    watchdog,
)
from vmckpt.agent.replication.backup import PORT
from vmckpt.errors import (
    BadInput,
    GuestLocked,
    HypervisorError,
    LeaseLost,
    RemoteError,
    TwoCopies,
    VmckptError,
)
from vmckpt.hypervisor import connection, qemu_user
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.lease.client import LeaseClient, LeaseForgotten
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication import control_socket
from vmckpt.replication.backup import standby as standbys
from vmckpt.replication.backup import standby_setup
from vmckpt.replication.protocol import connection as protocol_connection
from vmckpt.replication.session import (
    ProtectionOutcome,
    Session,
    folder_of,
    make_folder,
    remove_folder,
)
from vmckpt.replication.watchdog import process as watchdog_process
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt.units import Seconds
from vmckpt.util import host_directories

_STARTS = Seconds(30.0)
_STARTS_AGAIN = Seconds(2.0)
_ENDS = Seconds(30.0)
_TURN = 0.05


def carry_out(order: ReplicaOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Raises VmckptError."""
    del channel
    if order.what not in _WHAT:
        raise BadInput(f"an order that is not known: {order.what!r}", hint="update vmckpt there")
    return _WHAT[order.what](order)


def _identity(order: ReplicaOrder) -> dict[str, Any]:
    """A certificate for the session; nothing of an earlier one may be there."""
    _must_be_free(order)
    return {
        "certificate": protocol_connection.make_identity(make_folder(order.guest)),
        "owner": qemu_user.owner(order.uri, order.host),
    }


def _must_be_free(order: ReplicaOrder) -> None:
    session = Session.read(folder_of(order.guest))
    if session is not None and not (folder_of(order.guest) / teardown.OUTCOME).exists():
        raise BadInput(
            f"{session.name} is protected or moves already, from or to {order.host}",
            hint=f"run vmckpt recover, or vmckpt unprotect {session.name} first; with"
            " --lost-journal if no journal knows of it",
        )
    remove_folder(folder_of(order.guest))


def _stand(order: ReplicaOrder) -> dict[str, Any]:
    """Make the standby and start its agent; where it listens."""
    session = _session(order)
    (folder_of(order.guest) / protocol_connection.PEER).write_text(order.peer)
    session.write(folder_of(order.guest))
    try:
        standby_setup.make(session, order.xml)
        _begin(order, "the standby's agent")
        return {"port": int((folder_of(order.guest) / PORT).read_text())}
    except BaseException:
        with suppress(VmckptError):
            _stop_agent(folder_of(order.guest))
            standby_setup.remove(session, folder_of(order.guest))
        raise


def _protect(order: ReplicaOrder) -> dict[str, Any]:
    """Start the primary's agent."""
    session = _session(order)
    (folder_of(order.guest) / protocol_connection.PEER).write_text(order.peer)
    session.write(folder_of(order.guest))
    teardown.note_alone(folder_of(order.guest))  # the standby has nothing of it yet
    _begin(order, "the guest's agent")
    return {}


def _begin(order: ReplicaOrder, who: str) -> None:
    """Start the agent and wait until it answers. Raises RemoteError."""
    _start(folder_of(order.guest))
    give_up = time.monotonic() + _STARTS
    while not _answers(folder_of(order.guest)):
        if time.monotonic() > give_up:
            raise RemoteError(f"{order.host}: {who} does not start{_why(order)}")
        time.sleep(_TURN)


def _ask(order: ReplicaOrder) -> dict[str, Any]:
    """What the agent says; what it left if there is none."""
    folder = folder_of(order.guest)
    try:
        session = Session.read(folder)
    except BadInput:
        session = None
    if session is None:
        runs = identity.runs(order.guest)
        return {"role": None, "runs": runs, "known": runs or _may_know(order)}
    told = {
        "role": session.role, "session": session.session, "peer": session.peer,
        "name": session.name, "guest": session.guest, "host": session.host,
        "runs": identity.runs(session.guest), "moves": session.moves,
        "has_lease": session.lease is not None,
    }  # fmt: skip
    # The agent may have ended before the guest did.
    if not told["runs"] and (why := teardown.watchdog_kill_reason(folder)) is not None:
        told |= {"outcome": ProtectionOutcome.DIED, "why": why}
    with suppress(OSError, ValueError):
        told |= json.loads((folder / teardown.OUTCOME).read_text())
    if (noted := handover.handover_record(folder)) is not None:
        told["given"] = noted
    if standby_setup.may_have_run(folder):
        told["ran"] = True
    if teardown.is_alone(folder):
        told["alone"] = True
    question = {} if order.wish is None else {"wish": order.wish, "leave": order.leave}
    # One that fails is started again by its watchdog, and answers a second later.
    patience = _STARTS_AGAIN if told["runs"] and "outcome" not in told else Seconds(0.0)
    try:
        return {**told, **_heard(folder, question, patience), "agent": True}
    except RemoteError as exc:
        if order.wish is not None and "outcome" not in told:
            raise
        says = f"{exc.message}{_why(order)}"
        return {**told, **_another_holds(session), "agent": False, "says": says}


def _another_holds(session: Session) -> dict[str, Any]:
    """The other host that holds the lease of a guest without an agent; empty: none is known.

    Whether the guest runs here is looked at after that: it may have ended with its lease.
    """
    if session.role != "primary" or session.lease is None:
        return {}
    with suppress(VmckptError), teardown.lease(session) as client:
        holder = client.look().holder
        if holder not in (None, session.host):
            return {"lease_holder": holder, "runs": identity.runs(session.guest)}
    return {}


def _heard(folder: Path, question: dict[str, Any], patience: Seconds) -> dict[str, Any]:
    """What an agent answers, perhaps not at once. Raises RemoteError."""
    until = time.monotonic() + patience
    while True:
        try:
            return control_socket.ask(folder, question)
        except RemoteError:
            if time.monotonic() >= until:
                raise
        time.sleep(_TURN)


def _end(order: ReplicaOrder) -> dict[str, Any]:
    """See that nothing of a protection is left on this host; may be repeated."""
    session = Session.read(folder_of(order.guest))
    if session is None:
        remove_folder(folder_of(order.guest))
        # If its host was started anew, all on tmpfs is gone.
        did = _forget_images(order) if order.state else []
        wanted = order.define and order.state and not _known(order)
        if wanted and teardown.define_kept(order.state, host=order.host, uri=order.uri):
            return {"did": [*did, "stored the guest's definition again"]}
        if not order.define and order.state:
            # The guest is another host's.
            shutil.rmtree(order.state, ignore_errors=True)
        return {"did": did}
    if order.owner not in (None, session.session):
        return {"did": []}
    if session.role == "backup":
        return {"did": _end_backup(order, session)}
    if session.moves:
        return _end_move(order, session)
    return {"did": _end_primary(order, session)}


def _forget_images(order: ReplicaOrder) -> list[str]:
    """Those of a standby, and of a test of it, that a reboot has ended."""
    tests = test_failover_files.forget_files(Path(order.state))
    made = standby_setup.forget_images(Path(order.state), order.owner)
    return (["removed the images of a test"] if tests else []) + [f"removed {one}" for one in made]


def _end_move(order: ReplicaOrder, session: Session) -> dict[str, Any]:
    """End the source's side of a migration: the guest runs on here, unless it was given away.

    Only the source knows that, so it comes first; the standby runs nothing by itself.
    """
    folder = folder_of(order.guest)
    _stop_agent(folder)
    with handover.without_agent(session, folder):
        if order.define and order.standby_gone:
            handover.revert(folder)
        if handover.handover_record(folder) is None:
            return {"did": _end_primary(order, session)}
        if order.define:
            return {"did": [], "given": True}
        # It runs on the target: nothing of it is this host's.
        handover.finish(session, folder)
        mirrors.end_all(session, folder, None)
        teardown.forget(session, folder)
        return {"did": ["removed what was left of the migration"], "given": True}


def _known(order: ReplicaOrder) -> bool:
    """Whether libvirt here knows the guest."""
    try:
        with QmpMonitor(order.guest, host=order.host, uri=order.uri):
            return True
    except HypervisorError as exc:
        if exc.code in connection.NOT_HERE:
            return False
        raise


def _may_know(order: ReplicaOrder) -> bool | None:
    """The same; None: libvirt does not say."""
    try:
        return _known(order)
    except HypervisorError:
        return None


def _end_backup(order: ReplicaOrder, session: Session) -> list[str]:
    folder = folder_of(order.guest)
    if not order.define and _takes_over(folder, session):
        raise _by_now(order, session)
    _stop_agent(folder)
    if not order.define and _takes_over(folder, session):  # in that moment
        (folder / watchdog_process.OVER).unlink(missing_ok=True)
        _start(folder)
        raise _by_now(order, session)
    test_failover_files.clear(session)
    if _takes_over(folder, session):
        _settle(order, session, folder)
        standby_setup.clear(session, folder)
        return ["the guest is an ordinary one"]
    return list(standby_setup.remove(session, folder))


def _takes_over(folder: Path, session: Session) -> bool:
    """Whether the guest is this host's: it runs here, or did, or is about to."""
    return standby_setup.is_ours(folder) and not standby_setup.never_came_to_life(session, folder)


def _by_now(order: ReplicaOrder, session: Session) -> GuestLocked:
    return GuestLocked(f"{session.name} runs on {order.host} by now", hint="try again")


def _settle(order: ReplicaOrder, session: Session, folder: Path) -> None:
    """The guest is this host's: what its agent may not have come to is done now. What its owner has
    done since stays."""
    if standby_setup.is_settled(folder):
        return
    autostart = bool(session.extra.get("autostart"))
    if identity.runs(session.guest):
        with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
            standbys.settle(monitor, session.definition, autostart=autostart)
    elif not _known(order):
        teardown.define(session)


def _end_primary(order: ReplicaOrder, session: Session) -> list[str]:
    folder = folder_of(order.guest)
    runs_here = identity.runs(session.guest)
    if runs_here and not order.define and not session.moves:
        return _end_second_copy(session, folder)
    if runs_here and order.standby_gone:
        _must_hold_lease(session, folder)
        if session.lease is not None:
            # No other host can run the guest any more, so it need not end with its lease if we
            # die before all is ended. The agent that renews the lease is ended below.
            teardown.disarm(session)
    if runs_here and not order.standby_gone:
        _stop_safely(session, folder)
    else:
        _stop_agent(folder)
    if runs_here:
        with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
            teardown.unprotect(session, folder, monitor)
        return ["let the guest's output out", "ended its mirrors"]
    mirrors.end_all(session, folder, None)
    if order.define:
        teardown.define(session)
    teardown.forget(session, folder)
    return ["removed what was left of the protection"]


def _end_second_copy(session: Session, folder: Path) -> list[str]:
    """The guest is the other host's and runs here as well: end it, unless it was heard outside.

    What it sent since its last epoch waits in its filters, and goes with it. Raises TwoCopies.
    """
    _must_be_unheard(session, folder)
    _stop_agent(folder)
    _must_be_unheard(session, folder)  # its agent may have let it go on alone just before its end
    process = identity.hold(session.guest)
    if process is not None:
        with process:
            teardown.kill(process)
    mirrors.end_all(session, folder, None)
    teardown.forget(session, folder)
    return [f"ended the copy here, whose output was held; the guest runs on {session.peer}"]


def _must_be_unheard(session: Session, folder: Path) -> None:
    """Raises TwoCopies if output of the copy here was released."""
    if teardown.is_alone(folder):
        raise TwoCopies(
            f"{session.name} runs on {session.host} and on {session.peer}, and what it sent went"
            " out on both",
            hint=f"choose one, and end the other: virsh -c {session.uri} destroy {session.name}",
        )


def _must_hold_lease(session: Session, folder: Path) -> None:
    """Raises TwoCopies if another host has it. A store that is silent is no hindrance where the
    standby is known to be gone."""
    if session.lease is None:
        return
    with suppress(LeaseUnreachable, OSError, ValueError), teardown.lease(session) as client:
        if _renewed(client, folder) is None:
            raise TwoCopies(
                f"{session.name} runs on {session.host}, and another host holds its lease",
                hint=f"run vmckpt recover; see where it runs: vmckpt guests {session.peer}",
            )


def _session(order: ReplicaOrder) -> Session:
    if order.session is None:
        raise BadInput("an order without a session")
    session = Session.from_json(order.session)
    if session.state:
        host_directories.check_state(Path(session.state))
    return session


def _start(folder: Path) -> None:
    with (folder / watchdog_process.AGENT_LOG).open("ab") as log:
        subprocess.run(
            ["setsid", "--fork", *watchdog.agent_command(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", check=True,
        )  # fmt: skip


def _answers(folder: Path) -> bool:
    try:
        control_socket.ask(folder, {})
    except RemoteError:
        return False
    return True


def _why(order: ReplicaOrder) -> str:
    with suppress(OSError, IndexError):
        text = (folder_of(order.guest) / watchdog_process.AGENT_LOG).read_text(errors="replace")
        return f": {text.strip().splitlines()[-1]}"
    return ""


def _stop_safely(session: Session, folder: Path) -> None:
    """End the agent and its watchdog, while a standby may still take over: it must not, any more.

    Raises LeaseUnreachable, LeaseLost: then they go on.
    """
    if session.lease is None:
        _stop_agent(folder)
        return
    with teardown.lease(session) as client:
        # Nobody takes over for as long as this is good; longer than what follows may last.
        sent = _renewed(client, folder)
        if sent is None:
            raise LeaseLost(f"{session.name}: another host holds the lease")
        teardown.renewed(session, sent)
        _stop_agent(folder)
        try:
            token = client.invalidate(teardown.token(folder))
        except BaseException:
            (folder / watchdog_process.OVER).unlink()
            _start(folder)
            raise
        teardown.disarm(session)  # if we die before all is ended, nothing else would
        # Who tries this again must know it.
        (folder / "token").write_text(str(token))


def _renewed(client: LeaseClient, folder: Path) -> float | None:
    """Renew, also at a lease store that was failed over without the last token. None: it is lost.

    Raises LeaseUnreachable.
    """
    token = teardown.token(folder)
    try:
        return client.renew(token)
    except LeaseForgotten:
        token = client.acquire_again(token)
        (folder / "token").write_text(str(token))
        return client.renew(token)


def _revive(order: ReplicaOrder) -> dict[str, Any]:
    """Start the agent of a session that has none, and no watchdog that would; what was done.

    Raises RemoteError if it does not start.
    """
    folder = folder_of(order.guest)
    session = Session.read(folder)
    if session is None or session.session != order.owner or _answers(folder):
        return {"did": []}
    if (folder / teardown.OUTCOME).exists():
        return {"did": []}
    _end_agent(folder)  # it does not answer: it may be stopped
    (folder / watchdog_process.OVER).unlink(
        missing_ok=True
    )  # of a command that did not come to its end
    _begin(order, "the agent")
    return {"did": [f"started the agent on {order.host} again"]}


def _give(order: ReplicaOrder) -> dict[str, Any]:
    """Hand the lease of a guest whose QEMU is gone to the backup, whose standby is whole; whether
    that was done.

    Its agent may have died between arming what ends the guest and calling the standby valid.
    Raises GuestLocked: it runs here, or had gone on without its standby; LeaseLost;
    LeaseUnreachable.
    """
    folder = folder_of(order.guest)
    session = Session.read(folder)
    if session is None or session.session != order.owner or session.lease is None:
        return {"given": False}
    if identity.runs(session.guest):
        raise GuestLocked(f"{session.name} runs on {session.host}")
    if teardown.is_alone(folder):
        raise GuestLocked(f"{session.name} went on without its standby before it ended")
    with teardown.lease(session) as client:
        token = teardown.token(folder)
        client.validate(token)
        client.hand_over(token, session.peer)
    return {"given": True}


def _stop_agent(folder: Path) -> None:
    """End the agent of a folder for good, by force: all it knows is written down."""
    (folder / watchdog_process.OVER).touch()
    _end_agent(folder)


def _end_agent(folder: Path) -> None:
    with suppress(OSError, ValueError):
        page = WatchdogPage.open(folder / watchdog_process.PAGE)
        known = page.agent
        page.close()
        process = watchdog_process.hold(known)
        if process is not None:
            with process:
                process.end(_ENDS)


_WHAT = {
    "ask": _ask,
    "before": queries.before,
    "end": _end,
    "give": _give,
    "identity": _identity,
    "look": queries.protection_facts,
    "protect": _protect,
    "revive": _revive,
    "room": queries.rooms,
    "stand": _stand,
}
