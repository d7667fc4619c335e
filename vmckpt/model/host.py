"""A host as the inventory describes it, what was found out about it, and its TLS certificates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from vmckpt.model.fencing import FenceTopology
from vmckpt.model.guest import GuestState
from vmckpt.units import Bytes, Seconds

AGENT_STATE = "/var/lib/vmckpt/agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class SshAddress:
    """How to log in."""

    address: str
    user: str = "root"
    port: int = 22
    key_file: Path | None = None
    """None: the agent's keys and the user's default ones."""
    known_hosts: Path | None = None
    """None: the user's and the system's known_hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One entry of hosts.yaml."""

    name: str
    uri: str
    """libvirt URI as seen from here."""
    peer_uri: str | None = None
    """libvirt URI as seen from the other hosts; None: the same as `uri`."""
    ssh: SshAddress | None = None
    """None: no ssh; some checks are then left to libvirt."""
    migration_address: str | None = None
    """Address that guests' memory is sent to; None: what the target's libvirt names."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    storage: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    """Bridges and libvirt networks for guests, by name."""
    agent_state: str = AGENT_STATE
    """A folder there for what outlives an agent."""
    fence: FenceTopology | None = None
    """What powers it off from outside; None: a person."""
    read_only: bool = False
    """Nothing is changed there: its libvirt is opened for reading."""

    @property
    def uri_for_peers(self) -> str:
        return self.peer_uri or self.uri

    @property
    def address_for_peers(self) -> str | None:
        """Where other hosts reach it; None: not known."""
        return self.migration_address or (self.ssh.address if self.ssh else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestOnHost:
    """A guest that a host knows, running or not."""

    name: str
    uuid: str
    state: GuestState


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host's libvirt says of it."""

    hostname: str
    uuid: str
    """libvirt's host UUID; equal ones make libvirt take two hosts for one."""
    libvirt_version: str
    qemu_version: str
    cpus: int
    memory: Bytes
    memory_free: Bytes
    """Free, or held by caches that can be dropped."""
    machines: frozenset[str]
    accelerators: frozenset[str]
    """Domain types offered: "kvm", "qemu" (TCG)."""
    networks: frozenset[str]
    """libvirt networks that are active."""
    guests: tuple[GuestOnHost, ...]


class NoTrace(StrEnum):
    """Why agents on a host may not trace QEMU, as far as can be seen without trying."""

    PROCESSOR = "only x86-64 is supported"
    YAMA = "kernel.yama.ptrace_scope = 3 forbids ptrace(2)"
    SELINUX = "SELinux's deny_ptrace forbids ptrace(2)"
    CAPABILITY = "the ssh login lacks CAP_SYS_PTRACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProbe:
    """What one look over ssh says of a host."""

    clock_skew: Seconds
    """The host's clock less ours."""
    clock_uncertainty: Seconds
    """Half the round trip: a smaller skew says nothing."""
    links: frozenset[str]
    """Network interfaces and bridges."""
    kvm_device: bool
    post_copy_by_root_only: bool
    """QEMU, as the user that it runs as there, may not use userfaultfd."""
    userfaultfd: bool
    memory_backing_dir: str
    memory_backing_kind: str
    """File system below it: "tmpfs", "ext2/ext3", … or "missing"."""
    storage_free: Mapping[str, Bytes]
    """For each storage folder of the inventory that exists."""
    certificates: Mapping[str, str]
    """PEM text by path; only those that exist."""
    no_trace: NoTrace | None = None
    """None: nothing is known that forbids it."""
    systemd: bool = False
    """systemd runs the host."""


CA = "ca-cert.pem"
SERVER = "server-cert.pem"
SERVER_KEY = "server-key.pem"
CLIENT = "client-cert.pem"
CLIENT_KEY = "client-key.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuCertificates:
    """What a host has of them, in the folder that its libvirt uses for migrations."""

    folder: str
    verifies_clients: bool
    """It accepts a stream only from whoever has a certificate."""
    present: frozenset[str]
    """The files that are there, keys included, by name."""
    pems: Mapping[str, str]
    """Text of the certificates among them, by name. Keys are never read."""
    hostname: str
    """What the host calls itself."""
    unreadable: frozenset[str] = frozenset()
    """Those of `present` that QEMU may not read, "." if it may not enter the folder; none if that
    could not be tried."""
    user: str = ""
    """As whom QEMU runs, if it is not root and known."""
