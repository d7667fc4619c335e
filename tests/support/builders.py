"""Small whole examples of the model, to be changed by `dataclasses.replace`."""

from pathlib import Path

from vmckpt.migration.plan.facts import Facts
from vmckpt.model.guest import Disk, Guest, GuestState, Nic
from vmckpt.model.host import Host, HostFacts, HostProbe, SshAddress
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

GUEST = Guest(
    name="web1", uuid="0d6f7a57-be04-4dd1-80ff-c8e5fa28580b", state=GuestState.RUNNING,
    persistent=True, autostart=False, memory=Bytes(256 * MIB), vcpus=1, accelerator="kvm",
    arch="x86_64", machine="pc-q35-7.2", cpu_mode="custom", cpu_xml="<cpu/>",
    disks=(Disk(target="vda", kind="file", source="/srv/web1.raw", cache="none",
                read_only=False, shareable=False),),
    nics=(Nic(kind="bridge", source="br0"),), host_devices=(), boot_files=(), kernel_arguments="",
    shared_memory=False, huge_pages=False, file_memory=False, snapshots=0, job=None,
)  # fmt: skip


def host_facts(uuid: str) -> HostFacts:
    return HostFacts(
        hostname="h", uuid=uuid, libvirt_version="9.0.0", qemu_version="7.2.22", cpus=8,
        memory=Bytes(64 << 30), memory_free=Bytes(32 << 30), machines=frozenset({"pc-q35-7.2"}),
        accelerators=frozenset({"kvm", "qemu"}), networks=frozenset({"default"}), guests=(),
    )  # fmt: skip


FACTS = Facts(
    name="web1", source="alpha", target="beta", guest=GUEST, source_facts=host_facts("a"),
    target_facts=host_facts("b"), target_links=frozenset({"lo", "br0"}),
    same_file={"/srv/web1.raw": True}, on_target={"/srv/web1.raw": True}, cpu_fits=True,
)  # fmt: skip

HOST = Host(
    name="alpha", uri="qemu+tcp://alpha/system", storage=("/srv",),
    ssh=SshAddress(address="alpha", key_file=Path("/k")),
)  # fmt: skip

PROBE = HostProbe(
    clock_skew=Seconds(0.01), clock_uncertainty=Seconds(0.05), links=frozenset({"br0"}),
    kvm_device=True, post_copy_by_root_only=False, userfaultfd=True,
    memory_backing_dir="/dev/shm", memory_backing_kind="tmpfs",
    storage_free={"/srv": Bytes(100 << 30)}, certificates={})  # fmt: skip


def sample(
    at: float = 0.0, *, iteration: int = 1, remaining: int = 100 * MIB, total: int = 256 * MIB,
    transferred: int = 0, bandwidth: int = 100 * MIB, dirty_rate: int | None = None,
    phase: JobPhase = JobPhase.PRE_COPY, expected_downtime: float | None = None,
) -> JobSample:  # fmt: skip
    return JobSample(
        at=Seconds(at), phase=phase, iteration=iteration, remaining=Bytes(remaining),
        total=Bytes(total), transferred=Bytes(transferred), bandwidth=BytesPerSecond(bandwidth),
        dirty_rate=None if dirty_rate is None else BytesPerSecond(dirty_rate),
        expected_downtime=None if expected_downtime is None else Seconds(expected_downtime),
        throttle=0,
    )  # fmt: skip
