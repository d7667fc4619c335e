"""What libvirt reports of a guest: how it ended, and devices that were plugged in or out."""

import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any, Self

import libvirt

from vmckpt.hypervisor import library
from vmckpt.units import Seconds


class Ending(StrEnum):
    """What libvirt says about it."""

    WISHED = "wished"
    """Shut down from inside or outside, destroyed, saved, migrated away, or it panicked."""
    DIED = "died"
    """Nobody asked for it."""


class Endings:
    """Listens for a guest's end. Use as `with Endings(uuid, uri=...) as endings`."""

    def __init__(self, guest: str, *, uri: str) -> None:
        self._guest, self._uri = guest, uri
        self.on_device: Callable[[str, bool], None] | None = None
        """Called in libvirt's thread with libvirt's alias of a device, and whether it was plugged
        in. It must not call libvirt."""
        self._told = threading.Event()
        self._ending = Ending.DIED
        self._connection: libvirt.virConnect | None = None

    def __enter__(self) -> Self:
        """A libvirt that cannot be reached tells nothing: then its QEMU died, for all we know."""
        library.start()
        self._listen()
        return self

    def keep(self) -> None:
        """Listen again if libvirt was started anew; to be called now and then."""
        alive = False
        with suppress(libvirt.libvirtError):
            alive = self._connection is not None and self._connection.isAlive() == 1
        if not alive:
            self._listen()

    def _listen(self) -> None:
        with suppress(libvirt.libvirtError):
            self._connection = libvirt.open(library.without_questions(self._uri))
            domain = self._connection.lookupByUUIDString(self._guest)
            for kind, take in (
                (libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._take),
                (libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_ADDED, self._plugged_in),
                (libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, self._plugged_out),
            ):
                self._connection.domainEventRegisterAny(domain, kind, take, None)

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            with suppress(libvirt.libvirtError):
                self._connection.close()

    def _take(self, _: object, __: object, event: int, detail: int, ___: Any) -> None:
        if event == libvirt.VIR_DOMAIN_EVENT_CRASHED:
            self._ending = Ending.WISHED
            self._told.set()
        if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
            died = detail == libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED
            self._ending = Ending.DIED if died else Ending.WISHED
            self._told.set()

    def _plugged_in(self, _: object, __: object, device: str, ___: Any) -> None:
        self._tell(device, True)

    def _plugged_out(self, _: object, __: object, device: str, ___: Any) -> None:
        self._tell(device, False)

    def _tell(self, device: str, plugged: bool) -> None:
        listener = self.on_device
        if listener is not None:
            listener(device, plugged)

    def how(self, limit: Seconds) -> Ending:
        """How it ended, which it has; what is not told in that time was nobody's wish."""
        self._told.wait(limit)
        return self._ending
