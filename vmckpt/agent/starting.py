"""Starting a guest from memory, so that it is known whether it has started."""

import time
from collections.abc import Callable

from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.revive import Revival
from vmckpt.capture.qemu_stream.save_image import Fifo
from vmckpt.errors import HypervisorError, OutcomeUnknown
from vmckpt.hypervisor import connection, qmp
from vmckpt.hypervisor.qmp import Monitor
from vmckpt.units import Seconds

_PATIENCE = Seconds(60.0)
"""For a libvirtd that is started again."""
_TURN = Seconds(0.5)
_NOT_YET = ("inmigrate",)
_GONE = ("shutdown", "internal-error")


def start(order: RestoreOrder, xml: str, revival: Revival) -> None:
    """Start the guest. One whose links are to be down stands still until they are: with the state
    of a card QEMU loads that its link was up, whatever libvirt had set.

    Raises VmckptError if it did not start or was ended, OutcomeUnknown if nobody can tell.
    """
    paused = order.paused or order.links_down
    try:
        with Fifo(order.folder, revival.fill) as path:
            qmp.restore(str(path), xml, paused=paused, host=order.host, uri=order.uri)
    except OutcomeUnknown as exc:
        if not _has_started(order):
            raise revival.trouble or HypervisorError(
                f"{order.host}: the guest was not started: {exc.message}", host=order.host
            ) from exc
    except HypervisorError as exc:
        if revival.trouble is not None:
            raise revival.trouble from exc
        raise
    if order.links_down:
        try:
            _hush(order)
        except HypervisorError:
            # With its links up, or nobody knows: it may not stay, and neither may its images go.
            _end(order)
            raise


def _hush(order: RestoreOrder) -> None:
    with Monitor(order.guest, host=order.host, uri=order.uri) as there:
        for card in there.cards():
            there.tell("set_link", {"name": card, "up": False})
        if not order.paused:
            there.resume()


def _has_started(order: RestoreOrder) -> bool:
    """Raises OutcomeUnknown if libvirt does not say."""

    def look(there: Monitor) -> bool | None:
        state = there.run_state()
        return None if state in _NOT_YET else state not in _GONE

    what, why = "whether the guest was started is not known", "its memory is still being loaded"
    return _patiently(order, look, gone=False, what=what, why=why)


def _end(order: RestoreOrder) -> None:
    """Raises OutcomeUnknown if it may still be there."""

    def end(there: Monitor) -> bool:
        there.end()
        return True

    what = f"guest {order.guest} could not be ended and may have its links up"
    _patiently(order, end, gone=True, what=what, why="")


def _patiently(
    order: RestoreOrder, act: Callable[[Monitor], bool | None], *, gone: bool, what: str, why: str
) -> bool:
    """What `act` says once libvirt answers and it says something; `gone` if there is no guest.

    Raises OutcomeUnknown with `what`, and with `why` if libvirt did not even fail.
    """
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:
        try:
            with Monitor(order.guest, host=order.host, uri=order.uri) as there:
                told = act(there)
            if told is not None:
                return told
        except HypervisorError as exc:
            if exc.code in connection.NOT_HERE:
                return gone
            why = exc.message
        time.sleep(_TURN)
    raise _unknown(order, what, why)


def _unknown(order: RestoreOrder, what: str, why: str) -> OutcomeUnknown:
    error = OutcomeUnknown(
        f"{order.host}: {what}; all images stay as they are: {why}",
        host=order.host, mend="run vmckpt recover once its libvirt answers",
    )  # fmt: skip
    error.undone = False
    return error
