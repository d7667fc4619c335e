"""Names, addresses and directories of a lab, derived from its name and a subnet number. Pure.

Networks are from 198.18.0.0/15, which RFC 2544 reserves for tests of network equipment, so a lab
never shadows an office or data-centre network.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

HOST_NAMES = ("alpha", "beta", "gamma", "delta")
LABS = Path("/var/lib/vmckpt/labs")
CACHE = Path("/var/cache/vmckpt")
OBSERVER_PORT = 7000
GUEST_PORT = 7001
STORE_PORT = 7003
"""Port of a guest's key-value store."""
GUEST_BRIDGE = "guests"
WITNESS = "witness"
OBSERVER = "observer"

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,22}[a-z0-9])?")


def check_name(name: str) -> str:
    """Return a valid name of a lab or guest. Raises ValueError, with the rule, if it is invalid."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r}: use 1 to 24 characters from a-z, 0-9 and '-', not beginning or ending with"
            " '-'"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """Name, address and directories of a lab host."""

    name: str
    address: str
    """Address on the lab's network, for libvirt, ssh and migrations."""
    namespace: str
    """Name of the network namespace, as in `ip netns`."""
    link: str
    """Outer end of the host's link, on the lab's bridge; setting it down isolates the host."""
    root: Path
    """Directory on this machine that contains the host's private directories."""
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabPlan:
    """The settings of a lab, and all names and addresses that are derived from the settings."""

    name: str
    subnet: int
    """Number of the lab's networks, 0 to 255: the third byte of 198.18.x.0/24 (hosts) and
    198.19.x.0/24 (guests).
    """
    host_count: int
    witness: bool = False
    qemu_user: str = "root"
    """User that the hosts' QEMU processes run as."""

    @property
    def folder(self) -> Path:
        return LABS / self.name

    @property
    def tag(self) -> str:
        """Four characters that make link names unique; a link name has at most 15 characters."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:4]

    @property
    def bridge(self) -> str:
        return f"vk{self.tag}"

    @property
    def prefix(self) -> str:
        return namespace_prefix(self.name)

    @property
    def hosts(self) -> tuple[HostPlan, ...]:
        return tuple(self._host(i, name) for i, name in enumerate(HOST_NAMES[: self.host_count]))

    def _host(self, index: int, name: str) -> HostPlan:
        digest = hashlib.sha256(f"{self.name}/{name}".encode()).hexdigest()
        return HostPlan(
            name=name,
            address=f"198.18.{self.subnet}.{11 + index}",
            namespace=self.prefix + name,
            link=self.link_to(name),
            root=self.folder / "hosts" / name,
            uuid="-".join(
                (digest[:8], digest[8:12], "4" + digest[13:16], "8" + digest[17:20], digest[20:32])
            ),
        )

    def host(self, name: str) -> HostPlan:
        """Return the host with this name. Raises KeyError if the lab has no such host."""
        return {host.name: host for host in self.hosts}[name]

    def link_to(self, name: str) -> str:
        return f"{self.bridge}-{name}"

    @property
    def controller_address(self) -> str:
        return f"198.18.{self.subnet}.1"

    @property
    def witness_address(self) -> str:
        return f"198.18.{self.subnet}.50"

    @property
    def observer_address(self) -> str:
        return f"198.19.{self.subnet}.1"

    @property
    def observer_namespace(self) -> str:
        return self.prefix + OBSERVER

    @property
    def witness_namespace(self) -> str:
        return self.prefix + WITNESS

    @property
    def observer_socket(self) -> Path:
        return self.folder / "observer.sock"

    @property
    def inventory(self) -> Path:
        return self.folder / "hosts.yaml"

    @property
    def shared(self) -> Path:
        """Shared storage, under the same path on every host."""
        return self.folder / "shared"

    @property
    def private(self) -> Path:
        """Private storage: the same path on every host, but a different directory on each host."""
        return self.folder / "private"

    def guest_address(self, number: int) -> str:
        """Return the address of guest `number`, counted from 0."""
        return f"198.19.{self.subnet}.{100 + number}"


def namespace_prefix(lab: str) -> str:
    """Return the prefix of a lab's network namespaces; '.' distinguishes labs "a" and "a-b"."""
    return f"vmckpt.{lab}."


def free_subnet(name: str, taken: set[int]) -> int:
    """Return a free subnet number. If possible, a name always gets the same number.

    Raises ValueError if all numbers are taken.
    """
    first = int(hashlib.sha256(name.encode()).hexdigest()[4:6], 16)
    for step in range(256):
        if (first + step) % 256 not in taken:
            return (first + step) % 256
    raise ValueError("all 256 lab networks are in use")
