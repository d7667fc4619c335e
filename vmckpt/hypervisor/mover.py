"""The migration calls of libvirt, behind the port `model.ports.Mover`."""

import json
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import libvirt
import libvirt_qemu

from vmckpt.errors import HypervisorError, PeerLoginFailed
from vmckpt.hypervisor import guests, library, orders, parse
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import Presence
from vmckpt.model.migration import AutoConverge, Driver, JobSample, JobTotals, MoveOrder
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

# libvirt's own greatest limit in MiB/s, which it takes for none.
_NO_LIMIT = (2**63 - 1) // MIB
# What QEMU comes with.
_QEMU_THROTTLE = AutoConverge(initial=20, increment=10, at_most=99)


class LibvirtMover:
    """Moves one guest from one host to another."""

    def __init__(
        self,
        source: Hypervisor,
        target: Hypervisor,
        uuid: str,
        *,
        free_target: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`free_target` drops the target's end of a dead stream, by whatever way there is."""
        self._source = source
        self._target = target
        self._uuid = uuid
        self._free_target = free_target

    def _guest(self, connection: libvirt.virConnect) -> libvirt.virDomain:
        return connection.lookupByUUIDString(self._uuid)

    async def move(self, order: MoveOrder) -> None:
        """See Mover.move."""
        target = self._target.host
        flags, params = orders.flags(order), orders.params(order, target)

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
            raise orders.explained(exc, order, target) from exc

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
                post_copy=paused
                and reason
                in (libvirt.VIR_DOMAIN_PAUSED_POSTCOPY, libvirt.VIR_DOMAIN_PAUSED_POSTCOPY_FAILED),
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

    async def set_bandwidth(self, limit: BytesPerSecond | None, *, post_copy: bool) -> None:
        """See Mover.set_bandwidth; libvirt counts in whole MiB/s."""
        flags = libvirt.VIR_DOMAIN_MIGRATE_MAX_SPEED_POSTCOPY if post_copy else 0
        speed = _NO_LIMIT if limit is None else max(1, math.ceil(limit / MIB))
        await self._source.command(
            "limiting the bandwidth", lambda c: self._guest(c).migrateSetMaxSpeed(speed, flags)
        )

    async def throttle(self, how: AutoConverge | None) -> None:
        """See Mover.throttle.

        libvirt has no call that changes the throttle while a job runs, QEMU has.
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
        await self._source.command(
            "setting the CPU throttle",
            lambda c: libvirt_qemu.qemuMonitorCommand(self._guest(c), json.dumps(order), 0),
        )

    async def set_cache(self, size: Bytes) -> None:
        """See Mover.set_cache."""
        await self._source.command(
            "setting the compression cache",
            lambda c: self._guest(c).migrateSetCompressionCache(size),
        )

    async def halt(self) -> None:
        """See Mover.halt."""
        await self._source.command("pausing the guest", lambda c: self._guest(c).suspend())

    async def start_post_copy(self) -> None:
        """See Mover.start_post_copy."""
        await self._source.command(
            "switching to post-copy", lambda c: self._guest(c).migrateStartPostCopy()
        )

    async def stream_given_up(self) -> bool:
        """See Mover.stream_given_up.

        libvirt says "post-copy failed" also when only its own call was lost; QEMU knows.
        """

        def read(connection: libvirt.virConnect) -> bool:
            guest = self._guest(connection)
            answer = libvirt_qemu.qemuMonitorCommand(guest, '{"execute": "query-migrate"}', 0)
            return bool(json.loads(answer)["return"].get("status") == "postcopy-paused")

        try:
            return await self._source.ask("asking QEMU about the stream", read)
        except HypervisorError:
            return False

    async def free_target(self) -> None:
        """See Mover.free_target."""
        if self._free_target is not None:
            await self._free_target()

    async def forget_source(self) -> bool:
        """See Mover.forget_source.

        libvirt leaves the definition when the source's call was lost although the stream arrived,
        and when the source went down before it heard of the arrival.
        """
        return await self._forget(self._source, "source", kept=self._target)

    async def forget_target(self) -> bool:
        """See Mover.forget_target.

        libvirt defines it right before it starts the CPUs: a libvirtd that dies in between ends the
        copy when it is started again, and leaves the definition.
        """
        return await self._forget(self._target, "target", kept=self._source)

    async def _forget(self, at: Hypervisor, where: str, *, kept: Hypervisor) -> bool:
        def change(connection: libvirt.virConnect) -> bool:
            try:
                domain = self._guest(connection)
                if domain.state()[0] != libvirt.VIR_DOMAIN_SHUTOFF or not domain.isPersistent():
                    return False
            except libvirt.libvirtError as exc:
                if exc.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    return False
                raise
            # On a folder that both hosts have, these are the guest's.
            domain.undefineFlags(
                libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM | libvirt.VIR_DOMAIN_UNDEFINE_KEEP_TPM
            )
            return True

        if not await kept.ask(
            "asking for the guest's definition", lambda c: bool(self._guest(c).isPersistent())
        ):
            return False  # it is the only one there is
        return await at.command(f"undefining the guest on the {where}", change)

    async def presence(self) -> tuple[Presence, Presence]:
        """See Mover.presence."""
        return (
            await guests.presence(self._source, self._uuid),
            await guests.presence(self._target, self._uuid),
        )
