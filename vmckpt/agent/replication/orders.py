"""Orders of protections: short steps that start, query and stop the long-running agents."""

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
    """Carry out one step of a protection; `_WHAT` lists the steps.

    Returns the step's answer. Raises VmckptError, OSError, ValueError.
    """
    del channel
    if order.what not in _WHAT:
        raise BadInput(f"unknown order {order.what!r}", hint=f"update vmckpt on {order.host}")
    return _WHAT[order.what](order)


def _identity(order: ReplicaOrder) -> dict[str, Any]:
    """Create a certificate for a new session. Returns the certificate, and QEMU's user and group.

    Raises BadInput if an earlier session has not ended.
    """
    _must_be_free(order)
    return {
        "certificate": protocol_connection.make_identity(make_folder(order.guest)),
        "owner": qemu_user.owner(order.uri, order.host),
    }


def _must_be_free(order: ReplicaOrder) -> None:
    session = Session.read(folder_of(order.guest))
    if session is not None and not (folder_of(order.guest) / teardown.OUTCOME).exists():
        raise BadInput(
            f"{order.host} already takes part in a protection or migration of {session.name}",
            hint=f"run vmckpt recover, or vmckpt unprotect {session.name} (with --lost-journal if"
            " no journal contains the job)",
        )
    remove_folder(folder_of(order.guest))


def _stand(order: ReplicaOrder) -> dict[str, Any]:
    """Create the standby and start its agent. Returns the agent's port."""
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
    """Start the primary's agent. Returns an empty answer."""
    session = _session(order)
    (folder_of(order.guest) / protocol_connection.PEER).write_text(order.peer)
    session.write(folder_of(order.guest))
    teardown.note_alone(folder_of(order.guest))  # the standby has no epoch yet
    _begin(order, "the primary's agent")
    return {}


def _begin(order: ReplicaOrder, who: str) -> None:
    """Start the agent and wait until it answers.

    `who`: the agent's name for the error. Raises RemoteError.
    """
    _start(folder_of(order.guest))
    give_up = time.monotonic() + _STARTS
    while not _answers(folder_of(order.guest)):
        if time.monotonic() > give_up:
            raise RemoteError(f"{order.host}: {who} did not start{_why(order)}")
        time.sleep(_TURN)


def _ask(order: ReplicaOrder) -> dict[str, Any]:
    """Return the agent's status; if the agent is not running, the status in its files."""
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
    # The agent may have stopped before the guest did.
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
    # The watchdog restarts a failed agent. The new agent answers within a second.
    patience = _STARTS_AGAIN if told["runs"] and "outcome" not in told else Seconds(0.0)
    try:
        return {**told, **_heard(folder, question, patience), "agent": True}
    except RemoteError as exc:
        if order.wish is not None and "outcome" not in told:
            raise
        says = f"{exc.message}{_why(order)}"
        return {**told, **_another_holds(session), "agent": False, "says": says}


def _another_holds(session: Session) -> dict[str, Any]:
    """Return the other host that holds the lease of a guest without an agent; {} if none is known.

    Also returns whether the guest is still running. The guest is queried last, since it may have
    been killed when its lease expired.
    """
    if session.role != "primary" or session.lease is None:
        return {}
    with suppress(VmckptError), teardown.lease(session) as client:
        holder = client.look().holder
        if holder not in (None, session.host):
            return {"lease_holder": holder, "runs": identity.runs(session.guest)}
    return {}


def _heard(folder: Path, question: dict[str, Any], patience: Seconds) -> dict[str, Any]:
    """Query an agent, retrying for up to `patience`. Raises RemoteError if there is no answer."""
    until = time.monotonic() + patience
    while True:
        try:
            return control_socket.ask(folder, question)
        except RemoteError:
            if time.monotonic() >= until:
                raise
        time.sleep(_TURN)


def _end(order: ReplicaOrder) -> dict[str, Any]:
    """End a protection on this host, and remove all its files and processes; may be repeated.

    Returns what was done, under "did", and "given" if a migration had handed the guest over.
    """
    session = Session.read(folder_of(order.guest))
    if session is None:
        remove_folder(folder_of(order.guest))
        # After a reboot of the host, everything on tmpfs is gone.
        did = _forget_images(order) if order.state else []
        wanted = order.define and order.state and not _known(order)
        if wanted and teardown.define_kept(order.state, host=order.host, uri=order.uri):
            return {"did": [*did, "defined the guest again"]}
        if not order.define and order.state:
            # The guest belongs to another host.
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
    """Remove the images of a standby and of its failover test after a reboot.

    Returns what was done.
    """
    tests = test_failover_files.forget_files(Path(order.state))
    made = standby_setup.forget_images(Path(order.state), order.owner)
    return (["removed the images of a failover test"] if tests else []) + [
        f"removed {one}" for one in made
    ]


def _end_move(order: ReplicaOrder, session: Session) -> dict[str, Any]:
    """End a migration on the source, where the guest keeps running unless it was handed over.

    Only the source knows whether the guest was handed over, so the source gets this order before
    the target. The standby never starts the guest by itself. Returns what was done, under "did",
    and "given" if the guest was handed over.
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
        # The guest runs on the target, so everything here is removed.
        handover.finish(session, folder)
        mirrors.end_all(session, folder, None)
        teardown.forget(session, folder)
        return {"did": ["removed what was left of the migration"], "given": True}


def _known(order: ReplicaOrder) -> bool:
    """Return whether the guest exists in libvirt on this host."""
    try:
        with QmpMonitor(order.guest, host=order.host, uri=order.uri):
            return True
    except HypervisorError as exc:
        if exc.code in connection.NOT_HERE:
            return False
        raise


def _may_know(order: ReplicaOrder) -> bool | None:
    """Return whether the guest exists in libvirt on this host; None if libvirt does not answer."""
    try:
        return _known(order)
    except HypervisorError:
        return None


def _end_backup(order: ReplicaOrder, session: Session) -> list[str]:
    folder = folder_of(order.guest)
    if not order.define and _takes_over(folder, session):
        raise _by_now(order, session)
    _stop_agent(folder)
    if not order.define and _takes_over(folder, session):
        # The takeover began just before the agent was stopped.
        (folder / watchdog_process.OVER).unlink(missing_ok=True)
        _start(folder)
        raise _by_now(order, session)
    test_failover_files.clear(session)
    if _takes_over(folder, session):
        _settle(order, session, folder)
        standby_setup.clear(session, folder)
        return ["ended the protection; the guest stays on this host"]
    return list(standby_setup.remove(session, folder))


def _takes_over(folder: Path, session: Session) -> bool:
    """Return whether the guest belongs to this host: it is running, has run or is about to run."""
    return standby_setup.is_ours(folder) and not standby_setup.never_came_to_life(session, folder)


def _by_now(order: ReplicaOrder, session: Session) -> GuestLocked:
    return GuestLocked(f"{session.name} is now running on {order.host}", hint="try again")


def _settle(order: ReplicaOrder, session: Session, folder: Path) -> None:
    """Complete the failover steps that the agent may not have carried out.

    Runs only once per failover, so that later changes to the guest's definition are kept.
    """
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
            # No other host can run the guest any more, so the expired lease must not kill the guest
            # if this process dies. The agent that renews the lease is stopped below.
            teardown.disarm(session)
    if runs_here and not order.standby_gone:
        _stop_safely(session, folder)
    else:
        _stop_agent(folder)
    if runs_here:
        with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
            teardown.unprotect(session, folder, monitor)
        return ["released the guest's output", "stopped its disk mirrors"]
    mirrors.end_all(session, folder, None)
    if order.define:
        teardown.define(session)
    teardown.forget(session, folder)
    return ["removed what was left of the protection"]


def _end_second_copy(session: Session, folder: Path) -> list[str]:
    """Kill the local copy of a guest that belongs to the other host.

    The copy's output since the last epoch was buffered, and is discarded. Returns what was done.
    Raises TwoCopies if output of this copy was released.
    """
    _must_be_unheard(session, folder)
    _stop_agent(folder)
    _must_be_unheard(session, folder)  # its output may have been released just now
    process = identity.hold(session.guest)
    if process is not None:
        with process:
            teardown.kill(process)
    mirrors.end_all(session, folder, None)
    teardown.forget(session, folder)
    return [
        f"killed the copy on {session.host} and discarded its buffered output; the guest is running"
        f" on {session.peer}"
    ]


def _must_be_unheard(session: Session, folder: Path) -> None:
    """Check that no output of the copy here was released. Raises TwoCopies."""
    if teardown.is_alone(folder):
        raise TwoCopies(
            f"{session.name} is running on {session.host} and on {session.peer}, and the output of"
            " both copies was released",
            hint=f"keep one copy, and on the host of the other, run virsh -c {session.uri} destroy"
            f" {session.name}",
        )


def _must_hold_lease(session: Session, folder: Path) -> None:
    """Check that this host holds the lease. Raises TwoCopies if another host holds it.

    A lease store that does not answer is ignored, since the standby is known to be gone.
    """
    if session.lease is None:
        return
    with suppress(LeaseUnreachable, OSError, ValueError), teardown.lease(session) as client:
        if _renewed(client, folder) is None:
            raise TwoCopies(
                f"{session.name} is running on {session.host}, and another host holds its lease",
                hint=f"run vmckpt recover; find the guest with vmckpt guests {session.peer}",
            )


def _session(order: ReplicaOrder) -> Session:
    if order.session is None:
        raise BadInput("the controller did not name the protection or migration")
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
    """Stop the agent and its watchdog, and invalidate a standby that may still take over.

    Raises LeaseUnreachable or LeaseLost; the agent and the watchdog then keep running.
    """
    if session.lease is None:
        _stop_agent(folder)
        return
    with teardown.lease(session) as client:
        # The standby cannot take over while the lease is valid. That leaves time for these steps.
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
        teardown.disarm(session)  # immediately: no other process does it if this process dies
        # A repeated order needs the new token.
        (folder / "token").write_text(str(token))


def _renewed(client: LeaseClient, folder: Path) -> float | None:
    """Renew the lease, even if the lease store lost the last token in a failover.

    Returns the time of the request; None if the lease is lost. Raises LeaseUnreachable.
    """
    token = teardown.token(folder)
    try:
        return client.renew(token)
    except LeaseForgotten:
        token = client.acquire_again(token)
        (folder / "token").write_text(str(token))
        return client.renew(token)


def _revive(order: ReplicaOrder) -> dict[str, Any]:
    """Restart the agent of a session if it does not answer and the protection has not ended.

    Returns what was done, under "did". Raises RemoteError if the agent does not start.
    """
    folder = folder_of(order.guest)
    session = Session.read(folder)
    if session is None or session.session != order.owner or _answers(folder):
        return {"did": []}
    if (folder / teardown.OUTCOME).exists():
        return {"did": []}
    _end_agent(folder)  # the agent does not answer, but a signal may only have suspended it
    (folder / watchdog_process.OVER).unlink(
        missing_ok=True
    )  # an interrupted command may have left this file
    _begin(order, "vmckpt's agent")
    return {"did": [f"restarted vmckpt's agent on {order.host}"]}


def _give(order: ReplicaOrder) -> dict[str, Any]:
    """Hand the lease of a guest whose QEMU is gone to the backup, which has a complete standby.

    The agent may have died after it armed the kernel's timer, and before it recorded the standby as
    valid. Returns whether the lease was handed over, under "given". Raises GuestLocked if the guest
    is running here or has run unprotected; LeaseLost; LeaseUnreachable.
    """
    folder = folder_of(order.guest)
    session = Session.read(folder)
    if session is None or session.session != order.owner or session.lease is None:
        return {"given": False}
    if identity.runs(session.guest):
        raise GuestLocked(f"{session.name} is running on {session.host}")
    if teardown.is_alone(folder):
        raise GuestLocked(f"{session.name} ran unprotected before it stopped")
    with teardown.lease(session) as client:
        token = teardown.token(folder)
        client.validate(token)
        client.hand_over(token, session.peer)
    return {"given": True}


def _stop_agent(folder: Path) -> None:
    """Kill the agent of a protection permanently. All of the agent's state is in files."""
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
