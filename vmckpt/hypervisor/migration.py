"""libvirt's migration calls: flags, parameters, and clearer errors.

`LibvirtMigrationDriver` implements the protocol `model.migration.MigrationDriver`.
"""

import json
import math
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import libvirt
import libvirt_qemu

from vmckpt.errors import HypervisorError, MigrationRefused, PeerLoginFailed
from vmckpt.hypervisor import connection as hypervisor_connection
from vmckpt.hypervisor import domain_xml, domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.switchover_events import SwitchoverEvents
from vmckpt.model.guest import Presence
from vmckpt.model.host import Host
from vmckpt.model.migration import (
    AutoConverge,
    Compression,
    Driver,
    JobSample,
    JobTotals,
    MoveOrder,
)
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

Parameters = dict[str, int | str | list[str]]

_LEVELS = {
    Compression.ZLIB: "VIR_MIGRATE_PARAM_COMPRESSION_ZLIB_LEVEL",
    Compression.ZSTD: "VIR_MIGRATE_PARAM_COMPRESSION_ZSTD_LEVEL",
}


def migration_flags(order: MoveOrder) -> int:
    """Return the flags for migrateToURI3 and migrate3."""
    chosen = {
        libvirt.VIR_MIGRATE_ABORT_ON_ERROR: True,
        libvirt.VIR_MIGRATE_LIVE: order.live,
        libvirt.VIR_MIGRATE_PEER2PEER: order.driver is Driver.PEER_TO_PEER,
        libvirt.VIR_MIGRATE_PERSIST_DEST: order.persistent,
        libvirt.VIR_MIGRATE_UNDEFINE_SOURCE: order.persistent,
        # Copied disks pass libvirt's safety check anyway; this flag is for the other disks.
        libvirt.VIR_MIGRATE_UNSAFE: order.storage_proven,
        # A resumed migration must set the same capabilities as the first attempt.
        libvirt.VIR_MIGRATE_POSTCOPY: order.post_copy or order.resume,
        libvirt.VIR_MIGRATE_POSTCOPY_RESUME: order.resume,
        libvirt.VIR_MIGRATE_AUTO_CONVERGE: order.auto_converge is not None,
        libvirt.VIR_MIGRATE_TLS: order.tls_name is not None,
        libvirt.VIR_MIGRATE_PARALLEL: order.connections > 1,
        libvirt.VIR_MIGRATE_ZEROCOPY: order.zero_copy,
        libvirt.VIR_MIGRATE_COMPRESSED: order.compression is not Compression.NONE,
        libvirt.VIR_MIGRATE_NON_SHARED_DISK: bool(order.copied_disks) and not order.shallow,
        libvirt.VIR_MIGRATE_NON_SHARED_INC: bool(order.copied_disks) and order.shallow,
    }
    total = 0
    for flag, wanted in chosen.items():
        total |= flag if wanted else 0
    return total


def migration_params(order: MoveOrder, target: Host) -> Parameters:
    """Return the typed parameters for migrateToURI3 and migrate3.

    Raises HypervisorError if this machine's libvirt-python is too old for one of the parameters.
    """
    found: dict[str, int | str | list[str] | None] = {
        libvirt.VIR_MIGRATE_PARAM_DEST_XML: order.target_xml,
        libvirt.VIR_MIGRATE_PARAM_PERSIST_XML: order.target_definition,
        libvirt.VIR_MIGRATE_PARAM_BANDWIDTH: _mib(order.bandwidth),
        libvirt.VIR_MIGRATE_PARAM_BANDWIDTH_POSTCOPY: _mib(order.postcopy_bandwidth),
        libvirt.VIR_MIGRATE_PARAM_TLS_DESTINATION: order.tls_name,
    }
    if (address := target.migration_address) is not None:
        uri = f"tcp://{f'[{address}]' if ':' in address else address}"
        found[libvirt.VIR_MIGRATE_PARAM_URI] = uri
        found[libvirt.VIR_MIGRATE_PARAM_DISKS_URI] = uri if order.copied_disks else None
    if order.copied_disks:
        found[libvirt.VIR_MIGRATE_PARAM_MIGRATE_DISKS] = list(order.copied_disks)
    if (slowing := order.auto_converge) is not None:
        found[libvirt.VIR_MIGRATE_PARAM_AUTO_CONVERGE_INITIAL] = slowing.initial
        found[libvirt.VIR_MIGRATE_PARAM_AUTO_CONVERGE_INCREMENT] = slowing.increment
    if order.connections > 1:
        found[libvirt.VIR_MIGRATE_PARAM_PARALLEL_CONNECTIONS] = order.connections
    given: Parameters = {key: value for key, value in found.items() if value is not None}
    return given | _compression(order, target)


def _mib(rate: BytesPerSecond | None) -> int | None:
    """Return a limit in MiB/s, rounded up: to libvirt, 0 means no limit. Returns None for None."""
    return None if rate is None else max(1, math.ceil(rate / MIB))


def _compression(order: MoveOrder, target: Host) -> Parameters:
    method, level = order.compression, order.compression_level
    if method is Compression.NONE:
        return {}
    found: Parameters = {libvirt.VIR_MIGRATE_PARAM_COMPRESSION: [str(method)]}
    if method is Compression.XBZRLE and order.xbzrle_cache is not None:
        found[libvirt.VIR_MIGRATE_PARAM_COMPRESSION_XBZRLE_CACHE] = order.xbzrle_cache
    if method is Compression.MT and level is not None:
        found[libvirt.VIR_MIGRATE_PARAM_COMPRESSION_MT_LEVEL] = level
    if method in _LEVELS:
        key = getattr(libvirt, _LEVELS[method], None)
        if not isinstance(key, str):
            raise HypervisorError(
                f"compression {method} needs libvirt-python 9.4 or later on this machine",
                host=target.name,
                hint="upgrade libvirt-python, or choose compression xbzrle or none",
            )
        if level is not None:
            found[key] = level
    return found


_OF_GUEST = (
    libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_OPERATION_UNSUPPORTED,
    libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED, libvirt.VIR_ERR_MIGRATE_UNSAFE,
)  # fmt: skip
"""Errors with which the source's libvirt refuses a migration (qemuMigrationSrcIsAllowed,
qemuMigrationSrcIsSafe and qemuMigrationSrcBeginPhase of libvirt 9.0)."""
_OF_TARGET = (
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED, libvirt.VIR_ERR_XML_ERROR, libvirt.VIR_ERR_XML_DETAIL,
    libvirt.VIR_ERR_CPU_INCOMPATIBLE, libvirt.VIR_ERR_NO_SECRET, libvirt.VIR_ERR_NO_NETWORK,
    libvirt.VIR_ERR_NO_NWFILTER, libvirt.VIR_ERR_NO_STORAGE_POOL, libvirt.VIR_ERR_NO_STORAGE_VOL,
)  # fmt: skip
"""Errors with which the target's libvirt refuses to start the guest."""


def explained(error: HypervisorError, order: MoveOrder, target: Host) -> HypervisorError:
    """Return the error with a clearer cause and a hint where libvirt's message lacks them.

    A refusal by the libvirt of either host becomes MigrationRefused. Errors of a subclass of
    HypervisorError are returned unchanged.
    """
    if type(error) is not HypervisorError:
        return error
    said, doctor = error.message, f"run vmckpt doctor {error.host} {target.name}"
    if name := re.search(r"Certificate does not match the hostname (\S*)", said):
        text = f"{target.name}: the QEMU certificate is not valid for the name {name[1]!r}"
        return _renamed(error, text, doctor)
    if missing := re.search(r"Unable to access credentials (\S+): ([^:]+)$", said):
        text = f"{error.host} or {target.name}: QEMU cannot read {missing[1]} ({missing[2]})"
        return _renamed(error, text, doctor)
    # The target only sees an invalid stream; the source's reason is only in its QEMU's log.
    if order.tls_name is not None and re.search("(?<!non-)TLS|certificate", said):
        why = f": {said.rsplit(': ', 1)[1]}" if "certificate" in said and ": " in said else ""
        text = (
            f"{target.name}: TLS handshake with {error.host} failed: one host rejects the other's"
            f" QEMU certificate (expected name {order.tls_name!r}){why}"
        )
        return _renamed(error, text, doctor)
    if order.tls_name is not None and "Unable to write to socket: " in said:
        # A target that rejects the source's certificate may hang up without an alert.
        return _renamed(error, said, f"{doctor}: one host may reject the other's certificate")
    if order.zero_copy and "locked memory" in said:
        text = f"{error.host}: zero-copy: libvirtd cannot raise QEMU's limit for locked memory"
        return _renamed(error, text, "give libvirtd CAP_SYS_RESOURCE, or turn zero-copy off")
    if error.code in _OF_GUEST or error.code in _OF_TARGET:
        refusal = MigrationRefused(said, host=error.host, code=error.code)
        refusal.of_guest = error.code in _OF_GUEST
        return refusal
    return error


def _renamed(error: HypervisorError, text: str, hint: str) -> HypervisorError:
    return HypervisorError(text, host=error.host, code=error.code, hint=hint)


# The largest limit that libvirt accepts, in MiB/s; it means "no limit".
_NO_LIMIT = (2**63 - 1) // MIB
# QEMU's defaults.
_QEMU_THROTTLE = AutoConverge(initial=20, increment=10, at_most=99)


class LibvirtMigrationDriver:
    """Moves one guest from a source to a target. Implements `MigrationDriver`."""

    def __init__(
        self,
        source: Hypervisor,
        target: Hypervisor,
        uuid: str,
        *,
        free_target: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`free_target` makes the target close its end of a broken stream; None: not possible."""
        self._source = source
        self._target = target
        self._uuid = uuid
        self._free_target = free_target
        self._events = SwitchoverEvents(uuid)

    def _guest(self, connection: libvirt.virConnect) -> libvirt.virDomain:
        return connection.lookupByUUIDString(self._uuid)

    async def migrate(self, order: MoveOrder) -> None:
        """See MigrationDriver.migrate."""
        target = self._target.host
        flags, params = migration_flags(order), migration_params(order, target)

        def peer_to_peer(connection: libvirt.virConnect) -> None:
            self._guest(connection).migrateToURI3(target.uri_for_peers, params, flags)

        def client_driven(connection: libvirt.virConnect) -> None:
            arrival = libvirt.open(hypervisor_connection.without_questions(target.uri))
            with suppress(libvirt.libvirtError):
                # Otherwise a silent target would block the call until TCP's timeout.
                arrival.setKeepAlive(5, 3)
            try:
                self._guest(connection).migrate3(arrival, params, flags)
            finally:
                arrival.close()

        call = peer_to_peer if order.driver is Driver.PEER_TO_PEER else client_driven
        try:
            async with AsyncExitStack() as stack:
                if order.post_copy and not order.resume:
                    await stack.enter_async_context(
                        self._events.recorded(self._source, self._target)
                    )
                await self._source.execute_long("migration", call)
        except HypervisorError as exc:
            # libvirt has no error code for this; libvirtd's message is in the C locale.
            if "connect to remote libvirt URI" in exc.message:
                raise PeerLoginFailed(
                    exc.message, host=self._source.host.name, code=exc.code
                ) from exc
            raise explained(exc, order, target) from exc

    async def sample(self) -> JobSample | None:
        """See MigrationDriver.sample."""

        def read(connection: libvirt.virConnect) -> JobSample | None:
            try:
                domain = self._guest(connection)
                stats = domain.jobStats()
                state, reason = domain.state()
            except libvirt.libvirtError as exc:
                if exc.get_error_code() in (
                    libvirt.VIR_ERR_NO_DOMAIN,
                    libvirt.VIR_ERR_OPERATION_INVALID,
                ):
                    return None
                raise
            if not domain_xml.is_migration(stats):
                return None
            paused = state == libvirt.VIR_DOMAIN_PAUSED
            return domain_xml.job_sample(
                stats,
                at=Seconds(time.monotonic()),
                paused=paused and reason == libvirt.VIR_DOMAIN_PAUSED_MIGRATION,
                post_copy=paused
                and reason
                in (libvirt.VIR_DOMAIN_PAUSED_POSTCOPY, libvirt.VIR_DOMAIN_PAUSED_POSTCOPY_FAILED),
            )

        return await self._source.query("reading job statistics", read)

    async def totals(self) -> JobTotals | None:
        """See MigrationDriver.totals. Keeps the statistics in libvirt."""
        keep = libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED | libvirt.VIR_DOMAIN_JOB_STATS_KEEP_COMPLETED

        def read(connection: libvirt.virConnect) -> JobTotals | None:
            stats = self._guest(connection).jobStats(keep)
            return domain_xml.job_totals(stats) if stats.get("type") else None

        try:
            return await self._target.query("reading final statistics", read)
        except HypervisorError:
            return None

    async def switchover(self) -> Seconds | None:
        """See MigrationDriver.switchover."""
        return self._events.downtime

    async def abort(self) -> None:
        """See MigrationDriver.abort."""

        def change(connection: libvirt.virConnect) -> None:
            try:
                self._guest(connection).abortJob()
            except libvirt.libvirtError as exc:
                ended = (libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_OPERATION_INVALID)
                if exc.get_error_code() not in ended:
                    raise

        await self._source.execute("aborting the migration", change)

    async def set_autostart(self) -> None:
        """See MigrationDriver.set_autostart."""
        await self._target.execute("setting autostart", lambda c: self._guest(c).setAutostart(1))

    async def set_max_downtime(self, limit: Seconds) -> None:
        """See MigrationDriver.set_max_downtime; libvirt counts in whole milliseconds."""
        milliseconds = max(1, round(limit * 1000))
        await self._source.execute(
            "setting the downtime limit",
            lambda c: self._guest(c).migrateSetMaxDowntime(milliseconds),
        )

    async def max_downtime(self) -> Seconds:
        """See MigrationDriver.max_downtime."""
        milliseconds = await self._source.query(
            "reading the downtime limit", lambda c: self._guest(c).migrateGetMaxDowntime()
        )
        return Seconds(milliseconds / 1000)

    async def set_bandwidth(self, limit: BytesPerSecond | None, *, post_copy: bool) -> None:
        """See MigrationDriver.set_bandwidth; libvirt counts in whole MiB/s."""
        flags = libvirt.VIR_DOMAIN_MIGRATE_MAX_SPEED_POSTCOPY if post_copy else 0
        speed = _NO_LIMIT if limit is None else max(1, math.ceil(limit / MIB))
        await self._source.execute(
            "limiting the bandwidth", lambda c: self._guest(c).migrateSetMaxSpeed(speed, flags)
        )

    async def throttle(self, how: AutoConverge | None) -> None:
        """See MigrationDriver.throttle.

        libvirt cannot change the throttle of a running job, so this uses QMP.
        """
        how = how or _QEMU_THROTTLE
        order = {
            "execute": "migrate-set-parameters",
            "arguments": {
                "cpu-throttle-initial": how.initial,
                "cpu-throttle-increment": how.increment,
                "max-cpu-throttle": how.at_most,
            },
        }
        what, host = "setting the CPU throttle", self._source.host.name
        answer = await self._source.execute(
            what, lambda c: libvirt_qemu.qemuMonitorCommand(self._guest(c), json.dumps(order), 0)
        )
        if (refused := json.loads(answer).get("error")) is not None:
            raise HypervisorError(f"{host}: {what}: {refused['desc']}", host=host)

    async def set_cache(self, size: Bytes) -> None:
        """See MigrationDriver.set_cache."""
        await self._source.execute(
            "setting the compression cache",
            lambda c: self._guest(c).migrateSetCompressionCache(size),
        )

    async def pause_guest(self) -> None:
        """See MigrationDriver.pause_guest."""
        await self._source.execute("pausing the guest", lambda c: self._guest(c).suspend())

    async def start_post_copy(self) -> None:
        """See MigrationDriver.start_post_copy."""
        await self._source.execute(
            "switching to post-copy", lambda c: self._guest(c).migrateStartPostCopy()
        )

    async def is_postcopy_paused(self) -> bool:
        """See MigrationDriver.is_postcopy_paused.

        Queries QEMU, since libvirt also reports "post-copy failed" if only its own call was lost.
        """

        def read(connection: libvirt.virConnect) -> bool:
            guest = self._guest(connection)
            answer = libvirt_qemu.qemuMonitorCommand(guest, '{"execute": "query-migrate"}', 0)
            return bool(json.loads(answer)["return"].get("status") == "postcopy-paused")

        try:
            return await self._source.query("reading QEMU's migration status", read)
        except HypervisorError:
            return False

    async def free_target(self) -> None:
        """See MigrationDriver.free_target."""
        if self._free_target is not None:
            await self._free_target()

    async def undefine_on_source(self) -> bool:
        """See MigrationDriver.undefine_on_source.

        libvirt leaves the definition on the source in two cases: the call there was lost although
        the guest arrived, or the source went down before the target confirmed the arrival.
        """
        return await self._undefine(self._source, "source", kept=self._target)

    async def undefine_on_target(self) -> bool:
        """See MigrationDriver.undefine_on_target.

        libvirt defines the guest right before starting the CPUs. If libvirtd dies in between, the
        restarted libvirtd destroys the copy, but leaves the definition.
        """
        return await self._undefine(self._target, "target", kept=self._source)

    async def _undefine(self, at: Hypervisor, where: str, *, kept: Hypervisor) -> bool:
        def change(connection: libvirt.virConnect) -> bool:
            try:
                domain = self._guest(connection)
                if domain.state()[0] != libvirt.VIR_DOMAIN_SHUTOFF or not domain.isPersistent():
                    return False
            except libvirt.libvirtError as exc:
                if exc.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    return False
                raise
            # If both hosts share the directory, the guest still uses its NVRAM and TPM state.
            domain.undefineFlags(
                libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM | libvirt.VIR_DOMAIN_UNDEFINE_KEEP_TPM
            )
            return True

        if not await kept.query(
            "looking for the guest's definition", lambda c: bool(self._guest(c).isPersistent())
        ):
            return False  # it is the only definition
        return await at.execute(f"undefining the guest on the {where}", change)

    async def presence(self) -> tuple[Presence, Presence]:
        """See MigrationDriver.presence."""
        return (
            await domains.presence(self._source, self._uuid),
            await domains.presence(self._target, self._uuid),
        )
