"""The ways in which a guest's memory is captured, behind one call."""

import threading

from vmckpt.agent.orders import CreateOrder
from vmckpt.checkpoint import background
from vmckpt.checkpoint.background import Captured, Hooks
from vmckpt.hypervisor.monitor import Monitor


def capture(monitor: Monitor, order: CreateOrder, hooks: Hooks, stop: threading.Event) -> Captured:
    """Memory and device state of one instant; the guest goes on as it did before.

    Raises CannotCapture, CaptureFailed, HypervisorError or Cancelled.
    """
    return background.capture(monitor, order.folder, hooks, stop=stop)
