"""hosts.yaml: which hosts there are and how to reach them.

hosts:
  alpha:
    uri: qemu+ssh://root@alpha/system     # required; as seen from here
    peer_uri: qemu+tls://alpha/system     # as seen from the other hosts
    ssh: {address: alpha, user: root, port: 22, key_file: ~/.ssh/id_ed25519}
    migration_address: 10.1.0.11
    labels: {rack: a1}
    storage: [/var/lib/libvirt/images]
    networks: [br0]
observer: /run/observer.sock              # optional: somebody who watches guests from outside
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from vmckpt import yamlfile
from vmckpt.errors import InventoryError
from vmckpt.model.hosts import Host, SshAddress

_URI = re.compile(r"[a-z]+(\+[a-z0-9]+)?://.*")


def _uri(text: str) -> str:
    if _URI.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no libvirt URI, like qemu+ssh://root@alpha/system")
    return text


_Uri = Annotated[str, AfterValidator(_uri)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Ssh(_Strict):
    address: Annotated[str, Field(min_length=1)]
    user: str = "root"
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    key_file: str | None = None
    known_hosts: str | None = None


class _Host(_Strict):
    uri: _Uri
    peer_uri: _Uri | None = None
    ssh: _Ssh | None = None
    migration_address: str | None = None
    labels: dict[str, str] = {}
    storage: list[str] = []
    networks: list[str] = []


class _File(_Strict):
    hosts: Annotated[dict[str, _Host], Field(min_length=1)]
    observer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A hosts.yaml that was read and found good."""

    path: Path
    hosts: Mapping[str, Host]
    observer: Path | None

    def host(self, name: str) -> Host:
        """The host of that name; InventoryError with the likely one if there is none."""
        if name in self.hosts:
            return self.hosts[name]
        raise InventoryError(f"{self.path}: no host {name!r}{yamlfile.likely(name, self.hosts)}")


def find(explicit: Path | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the inventory is: `--inventory`, VMCKPT_INVENTORY, ./hosts.yaml; None if nowhere."""
    if explicit is not None:
        return explicit
    if named := environment.get("VMCKPT_INVENTORY"):
        return Path(named)
    here = Path("hosts.yaml")
    return here if here.exists() else None


def load(path: Path) -> Inventory:
    """Read hosts.yaml. Raises InventoryError that names file, line, key and the likely word."""
    return parse(yamlfile.read(path, InventoryError, "inventory"), path)


def parse(text: str, path: Path) -> Inventory:
    """As `load`, from text."""
    reading = yamlfile.examine(text, _File)
    if reading.value is None:
        raise InventoryError(yamlfile.first(reading.problems, path))
    read = reading.value
    hosts = {name: _host(name, entry) for name, entry in read.hosts.items()}
    return Inventory(
        path=path,
        hosts=MappingProxyType(hosts),
        observer=Path(read.observer) if read.observer else None,
    )


def _host(name: str, entry: _Host) -> Host:
    ssh = None
    if entry.ssh is not None:
        files = {
            key: Path(value).expanduser() if value else None
            for key, value in (
                ("key_file", entry.ssh.key_file),
                ("known_hosts", entry.ssh.known_hosts),
            )
        }
        ssh = SshAddress(
            address=entry.ssh.address, user=entry.ssh.user, port=entry.ssh.port, **files
        )
    return Host(
        name=name,
        uri=entry.uri,
        peer_uri=entry.peer_uri,
        ssh=ssh,
        migration_address=entry.migration_address,
        labels=MappingProxyType(entry.labels),
        storage=tuple(entry.storage),
        networks=tuple(entry.networks),
    )
