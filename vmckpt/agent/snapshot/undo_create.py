"""Undo a snapshot whose agent died, and find out whether it was published."""

from collections.abc import Callable
from typing import Any

from vmckpt.agent.orders import PutBackOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.snapshot import spool
from vmckpt.capture import network_hold
from vmckpt.capture.disks import live
from vmckpt.capture.disks.live import DiskUndo
from vmckpt.capture.fs_freeze import FsFreezeUndo
from vmckpt.capture.memory import background_snapshot, image, memory_files, undo_process
from vmckpt.capture.migration_settings import Undo
from vmckpt.capture.network_hold import HoldUndo
from vmckpt.errors import BadInput, HypervisorError, VmckptError
from vmckpt.hypervisor import connection
from vmckpt.hypervisor.backup import Backups
from vmckpt.hypervisor.guest_agent import GuestAgent, thaw_left
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.store import repository
from vmckpt.units import Seconds

# An agent that lost its controller takes a moment to give up. The undo process of a dead agent
# retries for longer.
_PATIENCE = Seconds(undo_process.LASTS + 60.0)


def put_back(order: PutBackOrder, _: ControllerChannel | None = None) -> dict[str, Any]:
    """Undo what an interrupted snapshot changed; may be repeated.

    Returns whether the snapshot is in the store, under "published". Raises VmckptError, OSError.

    The guest is restored to its normal state first. If the store then cannot be read, an error
    is raised, the checkpoint stays, and the order must be repeated.
    """
    with spool.held(order.folder, patience=Seconds(0.0) if order.dry else _PATIENCE) as lock:
        if not order.dry:
            _undo(order, lock)
            image.remove(order.folder)
            memory_files.sweep()
        try:
            store = repository.opened(order.store)
            published = any(one.id == order.snapshot for one in store.manifests())
        except VmckptError as exc:
            if not order.dry:
                exc.message = f"the snapshot's changes to the guest were undone; {exc.message}"
            raise
        if not order.dry and not published:
            _forget(order)
    return {"published": published}


def _undo(order: PutBackOrder, lock: int) -> None:
    try:
        capture = Undo.from_json(order.capture) if order.capture else None
        backup = DiskUndo.from_json(order.backup) if order.backup else None
        freeze = FsFreezeUndo.from_json(order.freeze) if order.freeze else None
        hold = HoldUndo.from_json(order.hold) if order.hold else None
    except ValueError as exc:
        raise BadInput(f"{order.snapshot}: {exc}") from exc
    acts: list[Callable[[QmpMonitor], object]] = []
    if hold is not None:
        acts.append(lambda monitor: network_hold.put_back(monitor, hold))
    if freeze is not None:
        acts.append(lambda monitor: thaw_left(GuestAgent(monitor)))
    if capture is not None:
        acts.append(lambda monitor: background_snapshot.undo_capture(monitor, capture, (lock,)))
    if backup is not None:
        acts.append(lambda monitor: live.put_back(Backups(monitor), backup, published=None))
    if acts:
        _on_guest(order, acts)
    if backup is not None:
        live.remove_left(backup.files)


def _forget(order: PutBackOrder) -> None:
    """Remove the checkpoint of a snapshot that was not published."""
    if order.backup:
        backup = DiskUndo.from_json(order.backup)
        put_back_ = live.put_back
        _on_guest(order, [lambda monitor: put_back_(Backups(monitor), backup, published=False)])


def _on_guest(order: PutBackOrder, acts: list[Callable[[QmpMonitor], object]]) -> None:
    try:
        with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
            for act in acts:
                act(monitor)
    except HypervisorError as exc:
        # If QEMU has terminated, there is nothing left to undo.
        if exc.code not in connection.NOT_HERE:
            raise
