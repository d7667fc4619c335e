"""After an agent's death: the guest is as it was, and it is said whether its snapshot is there."""

from collections.abc import Callable
from typing import Any

from vmckpt.agent import spool
from vmckpt.agent.orders import PutBackOrder
from vmckpt.checkpoint import background, copies, disk_capture, image, outputs
from vmckpt.checkpoint.disk_capture import DiskUndo
from vmckpt.checkpoint.outputs import HoldUndo
from vmckpt.checkpoint.quiet import QuietUndo
from vmckpt.checkpoint.settings import Undo
from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import library
from vmckpt.hypervisor.agent import GuestAgent, thaw_left
from vmckpt.hypervisor.backups import Backups
from vmckpt.hypervisor.monitor import Monitor
from vmckpt.store.places import backend_of
from vmckpt.store.store import Store
from vmckpt.units import Seconds

# A living agent whose controller is gone needs a moment to give up.
_PATIENCE = Seconds(30.0)


def put_back(order: PutBackOrder) -> dict[str, Any]:
    """Undo what taking a snapshot set; may be repeated. Raises VmckptError."""
    with spool.held(order.folder, patience=Seconds(0.0) if order.dry else _PATIENCE):
        store = Store.open(backend_of(order.store.url))
        published = any(one.id == order.snapshot for one in store.manifests())
        if not order.dry:
            _undo(order, published)
            image.remove(order.folder)
            copies.sweep()
    return {"published": published}


def _undo(order: PutBackOrder, published: bool) -> None:
    try:
        capture = Undo.from_json(order.capture) if order.capture else None
        backup = DiskUndo.from_json(order.backup) if order.backup else None
        freeze = QuietUndo.from_json(order.freeze) if order.freeze else None
        hold = HoldUndo.from_json(order.hold) if order.hold else None
    except ValueError as exc:
        raise BadInput(f"{order.snapshot}: {exc}") from exc
    acts: list[Callable[[Monitor], object]] = []
    if hold is not None:
        acts.append(lambda monitor: outputs.put_back(monitor, hold))
    if freeze is not None:
        acts.append(lambda monitor: thaw_left(GuestAgent(monitor)))
    if capture is not None:
        acts.append(lambda monitor: background.mend(monitor, capture))
    if backup is not None:
        acts.append(
            lambda monitor: disk_capture.put_back(Backups(monitor), backup, published=published)
        )
    if acts:
        _on_guest(order, acts)
    if backup is not None:
        disk_capture.remove_left(backup.files)


def _on_guest(order: PutBackOrder, acts: list[Callable[[Monitor], object]]) -> None:
    try:
        with Monitor(order.guest, host=order.host, uri=order.uri) as monitor:
            for act in acts:
                act(monitor)
    except HypervisorError as exc:
        # A QEMU that has ended took all of it along.
        if exc.code not in library.NOT_HERE:
            raise
