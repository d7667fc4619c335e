"""QEMU's monitor (QMP) of one guest, through libvirt, and who may call it from where.

Plain calls that block, for a thread on the guest's host: files can be given to QEMU only there. A
controller makes them from afar through its connection's thread.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import libvirt
import libvirt_qemu

from vmckpt.errors import HostUnreachable, HypervisorError, OutcomeUnknown
from vmckpt.hypervisor import connection as hypervisor_connection
from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.units import Seconds

T = TypeVar("T")

LOCAL = "qemu:///system"
_RETURNS = Seconds(5.0)
"""A libvirtd that is restarted is back by then, as a rule."""
_TURN = Seconds(0.1)


class QmpRefused(HypervisorError):
    """QEMU answered a command with an error."""


class QmpMonitor:
    """The monitor of one guest. Use as `with QmpMonitor(uuid, host="alpha") as monitor`.

    libvirt may be restarted meanwhile: a connection that broke is opened again for the next call.
    """

    def __init__(self, guest: str, *, host: str, uri: str = LOCAL) -> None:
        """`guest` is a UUID; `host` is for messages. Raises HypervisorError."""
        self.guest = guest
        self.host = host
        self.uri = uri
        hypervisor_connection.start()
        self._opening = threading.Lock()
        self._open()

    def _open(self) -> None:
        try:
            self._connection = libvirt.open(hypervisor_connection.without_questions(self.uri))
        except libvirt.libvirtError as exc:
            broken = hypervisor_connection.ConnectionBroken(exc, sent=False)
            raise hypervisor_connection.map_broken(
                broken, host=self.host, what="connecting", changes=False
            ) from exc
        try:
            self._domain = self._connection.lookupByUUIDString(self.guest)
        except libvirt.libvirtError as exc:
            refused = self._error("looking for the guest", exc, changes=False)
            self.close()
            raise refused from exc

    def __enter__(self) -> "QmpMonitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(libvirt.libvirtError):
            self._connection.close()

    @property
    def name(self) -> str:
        return self._domain.name()

    def ask(self, command: str, **arguments: object) -> Any:
        """A command that changes nothing. Raises HypervisorError."""
        return self._monitor(command, arguments, (), changes=False)

    def tell(self, command: str, arguments: dict[str, object], *, files: Sequence[int] = ()) -> Any:
        """A command that changes something. Raises HypervisorError, also OutcomeUnknown."""
        return self._monitor(command, arguments, files, changes=True)

    def run_state(self) -> str:
        """QEMU's word for how the guest is: running, paused, postmigrate, ..."""
        return str(self.ask("query-status")["status"])

    def is_active(self) -> bool:
        """Whether it has a QEMU."""
        return bool(self.on_domain("asking for the guest's state", libvirt.virDomain.isActive))

    def saved(self) -> bool:
        """Whether libvirt starts it from memory that it saved. Raises HypervisorError."""
        return bool(
            self._call("looking for saved memory", lambda: self._domain.hasManagedSaveImage(0))
        )

    def qemu_version(self) -> str:
        """Its QEMU's version, as "7.2.22"; of a guest that is off the one that it would get."""
        if not self.is_active():
            get = libvirt.virConnect.getVersion
            return domain_xml.version(self._call("asking for QEMU", lambda: get(self._connection)))
        told = self.ask("query-version")["qemu"]
        return f"{told['major']}.{told['minor']}.{told['micro']}"

    def paused_by_user(self) -> bool:
        """Whether it was paused by virDomainSuspend, by which libvirt gives the reason "user"."""
        state = self.on_domain("asking for the guest's state", libvirt.virDomain.state)
        return tuple(state) == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER)

    def xml(self) -> str:
        """The running guest as a restore wants it described, with its passwords."""
        flags = libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_SECURE
        return self._call("describing the guest", lambda: self._domain.XMLDesc(flags))

    def described(self) -> str:
        """The running guest with libvirt's names for its parts, and without passwords."""
        return self._call("describing the guest", lambda: self._domain.XMLDesc(0))

    def cards(self) -> list[str]:
        """QEMU's names for the guest's network cards."""
        nodes = domain_xml.tree(self.described(), "domain").findall("devices/interface/alias")
        return [name for node in nodes if (name := node.get("name"))]

    def resume(self) -> None:
        """Let the guest run. Raises HypervisorError."""
        self.on_domain("resuming the guest", libvirt.virDomain.resume, changes=True)

    def end(self) -> None:
        """End its QEMU at once. Raises HypervisorError."""
        self.on_domain("ending the guest", libvirt.virDomain.destroy, changes=True)

    def save_memory_live(self, xml: str) -> None:
        """libvirt's own snapshot of memory to a file, of which libvirt keeps no record."""
        flags = (
            libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_LIVE | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
        )
        self._call(
            "the memory snapshot", lambda: self._domain.snapshotCreateXML(xml, flags), changes=True
        )

    def on_domain(
        self, what: str, call: Callable[[libvirt.virDomain], T], *, changes: bool = False
    ) -> T:
        """See DomainCaller."""
        return self._call(what, lambda: call(self._domain), changes=changes)

    def abort_job(self) -> None:
        """End libvirt's job with the guest; fine if there is none."""

        def change() -> None:
            try:
                self._domain.abortJob()
            except libvirt.libvirtError as exc:
                if exc.get_error_code() != libvirt.VIR_ERR_OPERATION_INVALID:
                    raise

        self._call("aborting the job", change, changes=True)

    def _monitor(
        self, command: str, arguments: dict[str, object], files: Sequence[int], *, changes: bool
    ) -> Any:
        text = json.dumps({"execute": command, "arguments": arguments})

        def call() -> str:
            if not files:
                return libvirt_qemu.qemuMonitorCommand(self._domain, text, 0)
            answer, _ = libvirt_qemu.qemuMonitorCommandWithFiles(self._domain, text, list(files), 0)
            return answer

        answer = self._call(command, call, changes=changes)
        try:
            told = json.loads(answer)
            if "error" in told:
                raise QmpRefused(f"{self.host}: {command}: {told['error']['desc']}", host=self.host)
            return told["return"]
        except (ValueError, TypeError, LookupError) as exc:
            text = f"{self.host}: {command}: the answer makes no sense: {answer[:100]!r}"
            kind = OutcomeUnknown if changes else HypervisorError
            raise kind(text, host=self.host) from exc

    def _call(self, what: str, call: Callable[[], T], *, changes: bool = False) -> T:
        """libvirt's errors become ours. What changes nothing is asked again where the connection
        breaks; `call` must look for connection and domain each time."""
        self._connect_again()
        try:
            return call()
        except libvirt.libvirtError as exc:
            if changes or self._alive():
                raise self._error(what, exc, changes=changes) from exc
        self._connect_again()
        try:
            return call()
        except libvirt.libvirtError as exc:
            raise self._error(what, exc, changes=changes) from exc

    def _error(self, what: str, exc: libvirt.libvirtError, *, changes: bool) -> HypervisorError:
        if self._alive():
            return hypervisor_connection.map_refusal(exc, host=self.host, what=what)
        broken = hypervisor_connection.ConnectionBroken(exc, sent=True)
        return hypervisor_connection.map_broken(broken, host=self.host, what=what, changes=changes)

    def _alive(self) -> bool:
        try:
            return bool(self._connection.isAlive() == 1)
        except libvirt.libvirtError:
            return False

    def _connect_again(self) -> None:
        """If it is broken. Raises HypervisorError."""
        with self._opening:
            give_up = time.monotonic() + _RETURNS
            while not self._alive():
                self.close()
                try:
                    self._open()
                except HostUnreachable:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(_TURN)


def restore(path: str, xml: str, *, paused: bool, host: str, uri: str = LOCAL) -> None:
    """Let libvirt start a guest from a save image, which may be a FIFO. Raises HypervisorError."""
    flags = libvirt.VIR_DOMAIN_SAVE_PAUSED if paused else libvirt.VIR_DOMAIN_SAVE_RUNNING
    hypervisor_connection.once(
        uri,
        host,
        "restoring the guest",
        lambda connection: connection.restoreFlags(path, xml, flags),
        changes=True,
    )


class DomainCaller(Protocol):
    """One guest and how it is called. libvirt's errors become ours there or above it."""

    @property
    def host(self) -> str: ...

    def on_domain(
        self, what: str, call: Callable[[libvirt.virDomain], T], *, changes: bool = False
    ) -> T:
        """Raises HypervisorError, and OutcomeUnknown if `changes`."""


class _InConnectionThread:
    """In the thread of a lane, which makes ours of libvirt's errors itself."""

    def __init__(self, host: str, domain: libvirt.virDomain) -> None:
        self.host, self._domain = host, domain

    def on_domain(
        self, _what: str, call: Callable[[libvirt.virDomain], T], *, changes: bool = False
    ) -> T:
        del changes
        return call(self._domain)


async def call_on_domain(
    hypervisor: Hypervisor,
    uuid: str,
    what: str,
    call: Callable[[DomainCaller], T],
    *,
    changes: bool,
    limit: Seconds = Seconds(40.0),
) -> T:
    """Do from afar what is made for a `DomainCaller`, as `lambda guest: Backups(guest).opened()`.

    Raises HypervisorError, and OutcomeUnknown if it changes something.
    """

    def run(connection: libvirt.virConnect) -> T:
        return call(_InConnectionThread(hypervisor.host.name, connection.lookupByUUIDString(uuid)))

    if changes:
        return await hypervisor.execute(what, run, limit=limit)
    return await hypervisor.query(what, run, limit=limit)
