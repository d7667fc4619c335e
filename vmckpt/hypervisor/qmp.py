"""The QEMU monitor (QMP) of one guest, through libvirt, and libvirt calls on one guest.

`QmpMonitor` blocks, and must run in a thread on the guest's host, where file descriptors can be
passed to QEMU. A controller uses `call_on_domain`, which runs calls in a connection's thread.
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
from vmckpt.hypervisor import domain_xml, storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.units import Seconds

T = TypeVar("T")

LOCAL = "qemu:///system"
_RETURNS = Seconds(5.0)
"""How long to try to reconnect: a restarted libvirtd is usually back by then."""
_TURN = Seconds(0.1)


class QmpRefused(HypervisorError):
    """QEMU answered a command with an error."""


class QmpMonitor:
    """The monitor of one guest. Use as `with QmpMonitor(uuid, host="alpha") as monitor`.

    The next call reconnects if the connection broke, for example because libvirt was restarted.
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
        """Run a QMP command that changes nothing, and return its result.

        Raises HypervisorError; QmpRefused if QEMU answers with an error.
        """
        return self._monitor(command, arguments, (), changes=False)

    def tell(self, command: str, arguments: dict[str, object], *, files: Sequence[int] = ()) -> Any:
        """Run a QMP command that changes something, once, and return its result.

        `files`: descriptors to pass to QEMU. Raises HypervisorError, QmpRefused if QEMU answers
        with an error, OutcomeUnknown if the answer was lost or is invalid.
        """
        return self._monitor(command, arguments, files, changes=True)

    def run_state(self) -> str:
        """Return QEMU's run state, such as "running" or "postmigrate". Raises HypervisorError."""
        return str(self.ask("query-status")["status"])

    def is_active(self) -> bool:
        """Return whether the guest has a QEMU process. Raises HypervisorError."""
        return bool(self.on_domain("reading the guest's state", libvirt.virDomain.isActive))

    def saved(self) -> bool:
        """Return whether the guest has a managed save image. Raises HypervisorError."""
        return bool(
            self._call("looking for saved memory", lambda: self._domain.hasManagedSaveImage(0))
        )

    def qemu_version(self) -> str:
        """Return the version of the guest's QEMU, for example "7.2.22".

        If the guest is off, returns the version of QEMU on its host. Raises HypervisorError.
        """
        if not self.is_active():
            get = libvirt.virConnect.getVersion
            found = self._call("reading QEMU's version", lambda: get(self._connection))
            return domain_xml.version(found)
        told = self.ask("query-version")["qemu"]
        return f"{told['major']}.{told['minor']}.{told['micro']}"

    def paused_by_user(self) -> bool:
        """Return whether virDomainSuspend paused the guest (libvirt's reason "user").

        Raises HypervisorError.
        """
        state = self.on_domain("reading the guest's state", libvirt.virDomain.state)
        return tuple(state) == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER)

    def xml(self) -> str:
        """Return the running guest's XML for a restore, with passwords.

        Volumes of storage pools are given by path. Raises HypervisorError.
        """
        return self._xml(libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_SECURE)

    def described(self) -> str:
        """Return the running guest's XML with device aliases and without passwords.

        Volumes of storage pools are given by path. Raises HypervisorError.
        """
        return self._xml(0)

    def _xml(self, flags: int) -> str:
        return self._call(
            "reading the guest's XML", lambda: storage.definition(self._domain, flags)
        )

    def cards(self) -> list[str]:
        """Return the device aliases of the guest's network cards. Raises HypervisorError."""
        nodes = domain_xml.tree(self.described(), "domain").findall("devices/interface/alias")
        return [name for node in nodes if (name := node.get("name"))]

    def resume(self) -> None:
        """Resume the guest. Raises HypervisorError, OutcomeUnknown."""
        self.on_domain("resuming the guest", libvirt.virDomain.resume, changes=True)

    def end(self) -> None:
        """Destroy the guest. Raises HypervisorError, OutcomeUnknown."""
        self.on_domain("destroying the guest", libvirt.virDomain.destroy, changes=True)

    def save_memory_live(self, xml: str) -> None:
        """Save the running guest's memory to a file with a libvirt snapshot without metadata.

        `xml`: the `domainsnapshot` that names the file. Raises HypervisorError, OutcomeUnknown.
        """
        flags = (
            libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_LIVE | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
        )
        self._call(
            "saving memory", lambda: self._domain.snapshotCreateXML(xml, flags), changes=True
        )

    def on_domain(
        self, what: str, call: Callable[[libvirt.virDomain], T], *, changes: bool = False
    ) -> T:
        """See DomainCaller."""
        return self._call(what, lambda: call(self._domain), changes=changes)

    def abort_job(self) -> None:
        """Abort libvirt's job on the guest, if any. Raises HypervisorError, OutcomeUnknown."""

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
            text = f"{self.host}: {command}: invalid answer: {answer[:100]!r}"
            kind = OutcomeUnknown if changes else HypervisorError
            raise kind(text, host=self.host) from exc

    def _call(self, what: str, call: Callable[[], T], *, changes: bool = False) -> T:
        """Make a call and return its result. Maps libvirt's errors to `vmckpt.errors`.

        A call that changes nothing is repeated if the connection breaks, so `call` must read the
        connection and the domain from `self` each time.
        """
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
        """Reconnect if the connection is broken. Raises HypervisorError."""
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
    """Start a guest from a save image, which may be a FIFO.

    `xml`: the guest's definition; `paused`: start it paused. Raises HypervisorError,
    OutcomeUnknown.
    """
    flags = libvirt.VIR_DOMAIN_SAVE_PAUSED if paused else libvirt.VIR_DOMAIN_SAVE_RUNNING
    hypervisor_connection.once(
        uri,
        host,
        "restoring the guest",
        lambda connection: connection.restoreFlags(path, xml, flags),
        changes=True,
    )


class DomainCaller(Protocol):
    """Makes libvirt calls on one guest, from the guest's host or from a controller.

    An implementation maps libvirt's errors to `vmckpt.errors`, or leaves the mapping to its caller.
    """

    @property
    def host(self) -> str: ...

    def on_domain(
        self, what: str, call: Callable[[libvirt.virDomain], T], *, changes: bool = False
    ) -> T:
        """Run `call` with the guest's domain and return its result.

        `what` describes the call in errors. Raises HypervisorError, and OutcomeUnknown if
        `changes`; libvirtError if the implementation leaves the mapping to its caller.
        """


class _InConnectionThread:
    """A caller inside a connection's thread, where `Hypervisor` maps libvirt's errors."""

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
    """Run code written for a `DomainCaller` on a host's connection and return its result.

    For example `lambda guest: Backups(guest).opened()`. `changes`: the code changes something, so
    it is not retried. Raises HypervisorError; OutcomeUnknown and ReadOnly only if `changes`.
    """

    def run(connection: libvirt.virConnect) -> T:
        return call(_InConnectionThread(hypervisor.host.name, connection.lookupByUUIDString(uuid)))

    if changes:
        return await hypervisor.execute(what, run, limit=limit)
    return await hypervisor.query(what, run, limit=limit)
