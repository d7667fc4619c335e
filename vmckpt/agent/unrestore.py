"""After the death of an agent that restored a guest: it is back, or everything is as before."""

import shutil
from pathlib import Path
from typing import Any

from vmckpt.agent import images, spool
from vmckpt.agent.orders import UnrestoreOrder
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import library
from vmckpt.hypervisor.monitor import Monitor
from vmckpt.units import Seconds

_PATIENCE = Seconds(30.0)


def unrestore(order: UnrestoreOrder) -> dict[str, Any]:
    """Finish or undo a restore; may be repeated. Raises VmckptError.

    libvirt starts a guest after its images are in place, and whole from then on: if it runs, the
    restore has happened, whoever died since.
    """
    with spool.held(order.folder, patience=Seconds(0.0) if order.dry else _PATIENCE):
        arrived = _runs(order)
        if not order.dry:
            places = [Path(path) for path in order.images.values()]
            images.settle(places, order.snapshot, arrived=arrived)
            shutil.rmtree(order.folder, ignore_errors=True)
    return {"arrived": arrived}


def _runs(order: UnrestoreOrder) -> bool:
    try:
        with Monitor(order.guest, host=order.host, uri=order.uri) as monitor:
            return monitor.run_state() not in ("inmigrate", "shutdown", "internal-error")
    except HypervisorError as exc:
        if exc.code in library.NOT_HERE:
            return False
        raise
