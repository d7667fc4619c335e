"""A host: its entry in the inventory, facts read from it, and its TLS certificates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from vmckpt.model.fencing import FenceTopology
from vmckpt.model.guest import GuestState
from vmckpt.units import Bytes, Seconds

AGENT_STATE = "/var/lib/vmckpt/agent"
ADD_SSH = "add ssh: {address: ADDRESS} to the host in the inventory"
"""Hint for a host without a login by ssh."""
ADD_SSH_TO_BOTH = "add ssh: {address: ADDRESS} to both hosts in the inventory"


@dataclass(frozen=True, slots=True, kw_only=True)
class SshAddress:
    """How to log in to a host by ssh."""

    address: str
    user: str = "root"
    port: int = 22
    key_file: Path | None = None
    """File with the private key; None: the keys of the ssh agent and the user's default keys."""
    known_hosts: Path | None = None
    """File with known host keys; None: the user's and the system's known_hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host: one entry in hosts.yaml."""

    name: str
    uri: str
    """libvirt URI as seen from this machine."""
    peer_uri: str | None = None
    """libvirt URI as seen from the other hosts; None: the same as `uri`."""
    ssh: SshAddress | None = None
    """The login by ssh; None: there is no login, and some checks are left to libvirt."""
    migration_address: str | None = None
    """Address to which guests' memory is sent; None: the host's libvirt chooses the address."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    storage: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    """Bridges and libvirt networks for guests, by name."""
    agent_state: str = AGENT_STATE
    """Directory on the host for the agents' persistent state."""
    fence: FenceTopology | None = None
    """Devices that can power the host off; None: only an operator can power it off."""
    read_only: bool = False
    """Nothing is changed on the host: its libvirt is opened read-only."""

    @property
    def uri_for_peers(self) -> str:
        return self.peer_uri or self.uri

    @property
    def address_for_peers(self) -> str | None:
        """Address at which other hosts reach this host; None: unknown."""
        return self.migration_address or (self.ssh.address if self.ssh else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestOnHost:
    """A guest that a host knows, running or not."""

    name: str
    uuid: str
    state: GuestState


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts about a host from its libvirt."""

    hostname: str
    uuid: str
    """libvirt's host UUID. libvirt treats two hosts with equal UUIDs as the same host."""
    libvirt_version: str
    qemu_version: str
    cpus: int
    memory: Bytes
    memory_free: Bytes
    """Free memory, including caches that can be dropped."""
    machines: frozenset[str]
    accelerators: frozenset[str]
    """Supported domain types: "kvm", "qemu" (TCG)."""
    networks: frozenset[str]
    """Active libvirt networks."""
    guests: tuple[GuestOnHost, ...]
    platforms: Mapping[tuple[str, str], frozenset[str]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Machine types by architecture and domain type, such as ("x86_64", "kvm"); empty: unknown."""

    def runs(self, arch: str, accelerator: str) -> bool:
        """Return whether the host runs guests of this architecture with this domain type."""
        if self.platforms and arch:
            return (arch, accelerator) in self.platforms
        return accelerator in self.accelerators

    def machines_of(self, arch: str, accelerator: str) -> frozenset[str]:
        """Return the machine types for this architecture and domain type."""
        return self.platforms.get((arch, accelerator), self.machines)


class NoTrace(StrEnum):
    """Why agents on a host cannot trace QEMU, as far as is known without trying."""

    PROCESSOR = "only x86-64 and arm64 are supported"
    YAMA = "kernel.yama.ptrace_scope = 3 forbids ptrace(2)"
    SELINUX = "SELinux's deny_ptrace forbids ptrace(2)"
    CAPABILITY = "the ssh login lacks CAP_SYS_PTRACE"


TRACKS_WRITES = (6, 7)
"""The first Linux version with UFFD_FEATURE_WP_ASYNC and PAGEMAP_SCAN; see `write_tracking`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProbe:
    """Facts about a host, probed once over ssh."""

    clock_skew: Seconds
    """Estimate of the host's clock minus this machine's clock."""
    clock_uncertainty: Seconds
    """Half the round trip: the skew is within `clock_skew` plus or minus this time."""
    links: frozenset[str]
    """Network interfaces and bridges."""
    kvm_device: bool
    post_copy_by_root_only: bool
    """QEMU's user on the host is not allowed to use userfaultfd."""
    userfaultfd: bool
    memory_backing_dir: str
    memory_backing_kind: str
    """File system of `memory_backing_dir`: "tmpfs", "ext2/ext3", … or "missing"."""
    storage_free: Mapping[str, Bytes]
    """Free space of each of the inventory's storage directories that exists."""
    certificates: Mapping[str, str]
    """PEM text of the certificates that exist, by path."""
    kernel: tuple[int, int] | None = None
    """Major and minor version of the Linux kernel; None if unknown."""
    no_trace: NoTrace | None = None
    """Why agents cannot trace QEMU; None: no reason is known."""
    untested: bool = False
    """vmckpt has never made a system call in QEMU on this architecture."""
    soft_dirty: bool = False
    """The kernel sets soft-dirty bits (CONFIG_MEM_SOFT_DIRTY)."""
    systemd: bool = False
    """systemd manages the host."""

    @property
    def finds_writes(self) -> bool:
        """Whether the kernel is known to find the pages that a guest with private memory writes.

        It does so by write tracking or soft-dirty bits.
        """
        tracks = self.kernel is not None and self.kernel >= TRACKS_WRITES
        return self.soft_dirty or (tracks and self.no_trace is None)


CA = "ca-cert.pem"
SERVER = "server-cert.pem"
SERVER_KEY = "server-key.pem"
CLIENT = "client-cert.pem"
CLIENT_KEY = "client-key.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuCertificates:
    """QEMU's certificates on a host, in the directory that its libvirt uses for migrations."""

    folder: str
    verifies_clients: bool
    """The host accepts streams only from hosts with a client certificate."""
    present: frozenset[str]
    """Names of the files that exist, including keys."""
    pems: Mapping[str, str]
    """Text of the certificates in `present`, by name. Keys are never read."""
    hostname: str
    """The host's own name."""
    unreadable: frozenset[str] = frozenset()
    """Files in `present` that QEMU cannot read; "." if it cannot enter the directory. Empty if
    this could not be tested."""
    closed: str = ""
    """The first directory on the path to `folder` that QEMU cannot enter; empty if it can."""
    user: str = ""
    """QEMU's user; empty if it is root or unknown."""
