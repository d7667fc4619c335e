"""libvirt as a library: its event loop, its error output, and its errors in our words."""

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

import libvirt

from vmckpt.errors import HostUnreachable, HypervisorError, OutcomeUnknown

log = logging.getLogger("vmckpt.libvirt")

T = TypeVar("T")


@functools.cache
def start() -> None:
    """Run libvirt's event loop in a thread of its own and take its error output into our log.

    Keep-alive works only while that loop runs, and only for connections opened after this call.
    """
    libvirt.registerErrorHandler(lambda _context, error: log.debug("%s", error[2]), None)
    libvirt.virEventRegisterDefaultImpl()
    threading.Thread(target=_turn_for_ever, name="libvirt events", daemon=True).start()


def _turn_for_ever() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()


def without_questions(uri: str) -> str:
    """The URI with which ssh fails instead of asking for a password or about a host key.

    A question would appear in the middle of our output, and a yes to an unknown key would bypass
    the rule that host keys are verified.
    """
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri  # libvirt says what is wrong with it
    if not parts.scheme.endswith("+ssh") or "no_tty" in parse_qs(parts.query):
        return uri
    query = f"{parts.query}&no_tty=1" if parts.query else "no_tty=1"
    return urlunsplit(parts._replace(query=query))


@contextmanager
def opened(uri: str, host: str) -> Iterator[libvirt.virConnect]:
    """A connection for one visit. Raises HostUnreachable."""
    start()
    try:
        connection = libvirt.open(without_questions(uri))
    except libvirt.libvirtError as exc:
        what = Broken(exc, sent=False)
        raise broken(what, host=host, what="connecting", changes=False) from exc
    try:
        yield connection
    finally:
        with suppress(libvirt.libvirtError):
            connection.close()


def once(
    uri: str, host: str, what: str, call: Callable[[libvirt.virConnect], T], *, changes: bool
) -> T:
    """A call over a connection of its own. Raises HypervisorError, OutcomeUnknown if `changes`."""
    with opened(uri, host) as connection:
        try:
            return call(connection)
        except libvirt.libvirtError as exc:
            if connection.isAlive() == 1:
                raise refused(exc, host=host, what=what) from exc
            failed = Broken(exc, sent=True)
            raise broken(failed, host=host, what=what, changes=changes) from exc


NOT_HERE = (libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_OPERATION_INVALID)
"""Codes of errors that say: the host does not know the guest, or it does not run there."""


class Broken(Exception):
    """The connection failed, not the call."""

    def __init__(self, error: libvirt.libvirtError, *, sent: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.sent = sent
        """False: the call never left, so it cannot have changed anything."""


def refused(error: libvirt.libvirtError, *, host: str, what: str) -> HypervisorError:
    """Our error for a call that libvirt answered with no."""
    return HypervisorError(
        f"{host}: {what}: {_text(error)}", host=host, code=error.get_error_code()
    )


def broken(broken: Broken, *, host: str, what: str, changes: bool) -> HypervisorError:
    """Our error for a call whose connection broke; `changes`: it may have changed something."""
    text, code = _text(broken.error), broken.error.get_error_code()
    if changes and broken.sent:
        return OutcomeUnknown(
            f"{host}: the connection broke during {what}, which may have happened: {text}",
            host=host,
            code=code,
        )
    return HostUnreachable(
        f"{host}: libvirt cannot be reached: {text}",
        host=host,
        code=code,
        mend=f"run vmckpt doctor {host}",
    )


def _text(error: libvirt.libvirtError) -> str:
    return " ".join(str(error).split())
