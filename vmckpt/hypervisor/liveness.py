"""Signs of life of a running guest: the activity of its processors, disks and memory."""

import libvirt

from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.connection import NOT_HERE, Hypervisor
from vmckpt.model.guest import Pulse
from vmckpt.units import Bytes, Seconds

_STATS = (
    libvirt.VIR_DOMAIN_STATS_STATE
    | libvirt.VIR_DOMAIN_STATS_VCPU
    | libvirt.VIR_DOMAIN_STATS_BLOCK
    | libvirt.VIR_DOMAIN_STATS_DIRTYRATE
)
_PANICKED = (
    (libvirt.VIR_DOMAIN_CRASHED, libvirt.VIR_DOMAIN_CRASHED_PANICKED),
    (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_CRASHED),
    (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_CRASHED),
)


async def sample_liveness(hypervisor: Hypervisor, uuid: str, at: Seconds) -> Pulse:
    """Read a guest's state and activity counters once. Raises HypervisorError.

    `at`: the time to record. The state is None if the guest is gone, or if libvirt reports nothing
    about the guest.
    """

    def read(connection: libvirt.virConnect) -> Pulse:
        try:
            domain = connection.lookupByUUIDString(uuid)
            stats = connection.domainListGetStats([domain], _STATS)[0][1]
        except IndexError:
            return _gone(at)
        except libvirt.libvirtError as exc:
            if exc.get_error_code() in NOT_HERE:
                return _gone(at)
            raise
        return pulse(stats, at)

    return await hypervisor.query("reading a guest's activity", read)


async def measure_writes(hypervisor: Hypervisor, uuid: str, seconds: int) -> None:
    """Start QEMU's dirty rate measurement; later samples contain the result.

    `seconds`: the length of the measurement, limited to the range 1 to 60. Raises HypervisorError,
    OutcomeUnknown, ReadOnly.
    """

    def start(connection: libvirt.virConnect) -> None:
        connection.lookupByUUIDString(uuid).startDirtyRateCalc(max(1, min(60, seconds)), 0)

    await hypervisor.execute("starting a dirty rate measurement", start)


def pulse(stats: domain_xml.Stats, at: Seconds) -> Pulse:
    """Parse libvirt's statistics of one guest. Raises ValueError."""
    state = (int(stats.get("state.state", 0)), int(stats.get("state.reason", 0)))
    processors = int(stats.get("vcpu.current", 0))
    worked = sum(int(stats.get(f"vcpu.{n}.time", 0)) for n in range(processors))
    disks = range(int(stats.get("block.count", 0)))
    return Pulse(
        at=at,
        state=domain_xml.STATES.get(state[0]),
        panicked=state in _PANICKED,
        io_error=state == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR),
        processors=processors,
        worked=Seconds(worked / 1e9),
        read=Bytes(sum(int(stats.get(f"block.{n}.rd.bytes", 0)) for n in disks)),
        written=Bytes(sum(int(stats.get(f"block.{n}.wr.bytes", 0)) for n in disks)),
        dirtied=int(stats.get("dirtyrate.megabytes_per_second", 0)) > 0,
    )


def _gone(at: Seconds) -> Pulse:
    nothing = Bytes(0)
    return Pulse(
        at=at, state=None, panicked=False, io_error=False, processors=0, worked=Seconds(0.0),
        read=nothing, written=nothing, dirtied=False,
    )  # fmt: skip
