"""The migration calls of libvirt, behind the port `model.ports.Mover`."""

import math
import time
from contextlib import suppress

import libvirt

from vmckpt.errors import HypervisorError, PeerLoginFailed
from vmckpt.hypervisor import guests, library, parse
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guests import Presence
from vmckpt.model.jobs import JobSample, JobTotals
from vmckpt.model.ports import Driver, MoveOrder
from vmckpt.units import MIB, Seconds


class LibvirtMover:
    """Moves one guest from one host to another."""

    def __init__(self, source: Hypervisor, target: Hypervisor, uuid: str) -> None:
        self._source = source
        self._target = target
        self._uuid = uuid

    def _guest(self, connection: libvirt.virConnect) -> libvirt.virDomain:
        return connection.lookupByUUIDString(self._uuid)

    async def move(self, order: MoveOrder) -> None:
        """See Mover.move."""
        flags, params = _flags(order), self._params(order)
        target = self._target.host

        def peer_to_peer(connection: libvirt.virConnect) -> None:
            self._guest(connection).migrateToURI3(target.uri_for_peers, params, flags)

        def client_driven(connection: libvirt.virConnect) -> None:
            arrival = libvirt.open(library.without_questions(target.uri))
            with suppress(libvirt.libvirtError):
                # A target that falls silent must not hold the call for as long as TCP waits.
                arrival.setKeepAlive(5, 3)
            try:
                self._guest(connection).migrate3(arrival, params, flags)
            finally:
                arrival.close()

        call = peer_to_peer if order.driver is Driver.PEER_TO_PEER else client_driven
        try:
            await self._source.long_command("migration", call)
        except HypervisorError as exc:
            # libvirt has no code of its own for this; the words are the daemon's, in its C locale.
            if "connect to remote libvirt URI" in exc.message:
                raise PeerLoginFailed(
                    exc.message, host=self._source.host.name, code=exc.code
                ) from exc
            raise

    def _params(self, order: MoveOrder) -> dict[str, str | int]:
        params: dict[str, str | int] = {}
        if (address := self._target.host.migration_address) is not None:
            bracketed = f"[{address}]" if ":" in address else address
            params[libvirt.VIR_MIGRATE_PARAM_URI] = f"tcp://{bracketed}"
        if order.bandwidth is not None:
            params[libvirt.VIR_MIGRATE_PARAM_BANDWIDTH] = max(1, math.ceil(order.bandwidth / MIB))
        return params

    async def sample(self) -> JobSample | None:
        """See Mover.sample."""

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
            if not parse.is_migration(stats):
                return None
            paused = state == libvirt.VIR_DOMAIN_PAUSED
            return parse.job_sample(
                stats,
                at=Seconds(time.monotonic()),
                paused=paused and reason == libvirt.VIR_DOMAIN_PAUSED_MIGRATION,
                post_copy=paused and reason == libvirt.VIR_DOMAIN_PAUSED_POSTCOPY,
            )

        return await self._source.ask("reading job statistics", read)

    async def totals(self) -> JobTotals | None:
        """See Mover.totals. Read without removing them, so that others can read them too."""
        keep = libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED | libvirt.VIR_DOMAIN_JOB_STATS_KEEP_COMPLETED

        def read(connection: libvirt.virConnect) -> JobTotals | None:
            stats = self._guest(connection).jobStats(keep)
            return parse.job_totals(stats) if stats.get("type") else None

        try:
            return await self._target.ask("reading final statistics", read)
        except HypervisorError:
            return None

    async def abort(self) -> None:
        """See Mover.abort."""

        def change(connection: libvirt.virConnect) -> None:
            try:
                self._guest(connection).abortJob()
            except libvirt.libvirtError as exc:
                ended = (libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_OPERATION_INVALID)
                if exc.get_error_code() not in ended:
                    raise

        await self._source.command("aborting the migration", change)

    async def set_autostart(self) -> None:
        """See Mover.set_autostart."""
        await self._target.command("setting autostart", lambda c: self._guest(c).setAutostart(1))

    async def set_max_downtime(self, limit: Seconds) -> None:
        """See Mover.set_max_downtime; libvirt counts in whole milliseconds."""
        milliseconds = max(1, round(limit * 1000))
        await self._source.command(
            "setting the downtime limit",
            lambda c: self._guest(c).migrateSetMaxDowntime(milliseconds),
        )

    async def max_downtime(self) -> Seconds:
        """See Mover.max_downtime."""
        milliseconds = await self._source.ask(
            "reading the downtime limit", lambda c: self._guest(c).migrateGetMaxDowntime()
        )
        return Seconds(milliseconds / 1000)

    async def presence(self) -> tuple[Presence, Presence]:
        """See Mover.presence."""
        return (
            await guests.presence(self._source, self._uuid),
            await guests.presence(self._target, self._uuid),
        )


def _flags(order: MoveOrder) -> int:
    flags: int = libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_ABORT_ON_ERROR
    if order.driver is Driver.PEER_TO_PEER:
        flags |= libvirt.VIR_MIGRATE_PEER2PEER
    if order.persistent:
        flags |= libvirt.VIR_MIGRATE_PERSIST_DEST | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE
    if order.storage_proven:
        flags |= libvirt.VIR_MIGRATE_UNSAFE
    return flags
