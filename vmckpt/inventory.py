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
    agent_state: /var/lib/vmckpt/agent    # a folder there, for what snapshots keep between them
    fence:                                # optional: powers it off before a failover
      agent: fence_ipmilan                # of ClusterLabs' fence-agents, on this machine; or a path
      options:                            # the agent's own, as text
        {ip: 10.9.0.11, username: admin, lanplus: "1", password_file: /etc/vmckpt/alpha.password}
    # or levels, tried in turn; a level succeeds if all of its devices report off:
    # fence: {levels: [[{agent: fence_ipmilan, ...}], [{agent: fence_apc, ...}, {agent: ...}]]}
stores:                                   # optional: where snapshots are kept
  near: /srv/vmckpt                       # the first: they land there; a folder that all hosts see
  far: s3://bucket/vmckpt?endpoint=https://s3.example.com
lease: postgresql://vmckpt@witness/vmckpt # optional: who may run a protected guest; on no host
observer: /run/observer.sock              # optional: somebody who watches guests from outside
webhooks:                                 # optional: whom `vmckpt run` tells what to be paged for
  - url: https://alerts.example.com/vmckpt
    secret_file: /etc/vmckpt/webhook.secret
read_only: false                          # true: for people who may look and not touch
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)

from vmckpt.errors import InventoryError, ReadOnly
from vmckpt.model import fencing
from vmckpt.model.disk import StorePlace
from vmckpt.model.fencing import FenceDevice, FenceTopology
from vmckpt.model.host import AGENT_STATE, Host, SshAddress
from vmckpt.model.webhook import Webhook
from vmckpt.util import config_file

READ_ONLY = "VMCKPT_READ_ONLY"
VARIABLE = "VMCKPT_INVENTORY"
_AGENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|/[^\s]+")
_URI = re.compile(r"[a-z]+(\+[a-z0-9]+)?://.*")


def _uri(text: str) -> str:
    if _URI.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no libvirt URI, like qemu+ssh://root@alpha/system")
    try:
        _ = urlsplit(text).port  # that of brackets is seen at once, that of a port when asked for
    except ValueError as exc:
        raise ValueError(f"{text!r} is no libvirt URI: {exc}") from None
    return text


def _store(text: str) -> str:
    if text.startswith("s3://"):
        if not urlsplit(text).netloc:
            raise ValueError(f"{text!r} names no bucket, like s3://bucket/prefix")
        return text
    if not text.startswith("/"):
        raise ValueError(f"{text!r} is neither a whole path nor s3://bucket/prefix")
    return text


def _lease(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("postgresql", "postgres") or not parts.hostname:
        # Without the text: it may hold a password.
        raise ValueError("it is no lease store, like postgresql://user@witness/database")
    return text


def _http(text: str) -> str:
    # What is wrong is said without the URL: it may hold a secret.
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError("is no URL, like https://alerts.example.com/vmckpt")
    return text


def _name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is no name for a host; write one line that can be read")
    return text


def _store_name(text: str) -> str:
    # Hosts name folders after it.
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError(f"{text!r} is no name for a store; use letters, digits, - and _")
    return text


def _file(text: str) -> str:
    try:
        return str(Path(text).expanduser()) if text else text
    except RuntimeError:
        raise ValueError(f"{text!r}: nobody is called so here; write the whole path") from None


def _password_file(text: str) -> str:
    path = os.path.expanduser(text)  # noqa: PTH111 – that of Path has the text in its error
    if not path.startswith("/"):
        raise ValueError("password_file must be a whole path")
    return path


def _fence(value: Any) -> Any:
    """Check a device, or levels of devices. Values in it may be passwords: no error shows one."""
    if value is None or _kind_of_fence(value) == "(device)":
        return value if value is None else _fence_device(value)
    levels = value["levels"]
    if not isinstance(levels, list) or not all(isinstance(one, list) for one in levels):
        raise ValueError("levels must be a list of levels, each one a list of devices")
    if not levels or not all(levels):
        raise ValueError("each level must have a device; there must be a level")
    for number, devices in enumerate(levels, start=1):
        for one in devices:
            try:
                _fence_device(one)
            except ValueError as exc:
                raise ValueError(f"level {number}: {exc}") from None
    return value


def _kind_of_fence(value: Any) -> str:
    levels = isinstance(value, _FenceLevels) or (isinstance(value, dict) and "levels" in value)
    return "(levels)" if levels else "(device)"


def _fence_device(value: Any) -> Any:
    if not isinstance(value, dict) or not all(word.isidentifier() for word in value):
        raise ValueError("must be agent: NAME and options: {name: value, ...}")
    agent = value.get("agent", "fence_ipmilan")
    if not isinstance(agent, str) or not _AGENT.fullmatch(agent):
        raise ValueError(
            "agent must be a fence agent's name, like fence_ipmilan, or its whole path"
        )
    options = value.get("options", {})
    if not isinstance(options, dict):
        raise ValueError("options must be names with values, like {ip: 10.9.0.11}")
    for name, one in options.items():
        fencing.check_option(name, one)
    if {fencing.PASSWORD, fencing.PASSWORD_FILE} <= set(options):
        raise ValueError("password and password_file exclude each other")
    if fencing.PASSWORD_FILE in options:
        _password_file(options[fencing.PASSWORD_FILE])
    return value


_Uri = Annotated[str, AfterValidator(_uri)]
_Name = Annotated[str, AfterValidator(_name)]
_Path = Annotated[str, AfterValidator(_file)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Ssh(_Strict):
    address: Annotated[str, Field(min_length=1)]
    user: str = "root"
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    key_file: _Path | None = None
    known_hosts: _Path | None = None


class _Fence(_Strict):
    agent: str
    options: dict[str, str] = {}


class _FenceLevels(_Strict):
    levels: list[list[_Fence]]


class _Webhook(_Strict):
    url: Annotated[str, AfterValidator(_http)]
    secret_file: _Path | None = None


_AnyFence = Annotated[
    Annotated[_Fence, Tag("(device)")] | Annotated[_FenceLevels, Tag("(levels)")],
    Discriminator(_kind_of_fence),
]


class _Host(_Strict):
    uri: _Uri
    peer_uri: _Uri | None = None
    ssh: _Ssh | None = None
    migration_address: str | None = None
    labels: dict[str, str] = {}
    storage: list[str] = []
    networks: list[str] = []
    agent_state: Annotated[str, Field(pattern="/.+")] = AGENT_STATE
    fence: Annotated[_AnyFence | None, BeforeValidator(_fence)] = None


class _File(_Strict):
    hosts: Annotated[dict[_Name, _Host], Field(min_length=1)]
    stores: dict[
        Annotated[str, AfterValidator(_store_name)], Annotated[str, AfterValidator(_store)]
    ] = {}
    lease: Annotated[str, AfterValidator(_lease)] | None = None
    observer: str | None = None
    webhooks: list[_Webhook] = []
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A hosts.yaml that was read and found good."""

    path: Path
    hosts: Mapping[str, Host]
    observer: Path | None
    stores: Mapping[str, StorePlace] = field(default_factory=lambda: MappingProxyType({}))
    """Where snapshots are kept; they land in the first."""
    lease: str | None = None
    """Where leases on protected guests are kept: a PostgreSQL URL; None: nowhere."""
    webhooks: tuple[Webhook, ...] = ()
    read_only: bool = False
    """Only looking is allowed."""

    def may_act(self) -> None:
        """Raises ReadOnly if only looking is allowed."""
        may_act()
        if self.read_only:
            raise ReadOnly(
                f"only looking is allowed, as {self.path} says; nothing was changed",
                hint="use an inventory without read_only",
            )

    def store(self, name: str | None = None) -> StorePlace:
        """The store of that name, or the first; InventoryError if there is none."""
        if not self.stores:
            raise InventoryError(
                f"{self.path} names no store for snapshots",
                hint="add stores: {near: /srv/vmckpt} to it",
            )
        if name is None:
            return next(iter(self.stores.values()))
        if name in self.stores:
            return self.stores[name]
        raise InventoryError(
            f"{self.path}: no store {name!r}{config_file.likely(name, self.stores)}"
        )

    def host(self, name: str) -> Host:
        """The host of that name; InventoryError with the likely one if there is none."""
        if name in self.hosts:
            return self.hosts[name]
        raise InventoryError(f"{self.path}: no host {name!r}{config_file.likely(name, self.hosts)}")


def find(explicit: Path | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the inventory is: `--inventory`, VMCKPT_INVENTORY, ./hosts.yaml; None if nowhere."""
    if explicit is not None:
        return explicit
    if named := environment.get(VARIABLE):
        return Path(named)
    here = Path("hosts.yaml")
    return here if here.exists() else None


def looks_only(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether whoever runs this may look and not touch, whatever the inventory says."""
    return environment.get(READ_ONLY, "") not in ("", "0", "no", "false")


def may_act() -> None:
    """Raises ReadOnly if whoever runs this may only look."""
    if looks_only():
        raise ReadOnly(
            "only looking is allowed; nothing was changed",
            hint=f"leave --read-only and {READ_ONLY} away",
        )


def load(path: Path) -> Inventory:
    """Read hosts.yaml. Raises InventoryError that names file, line, key and the likely word."""
    return parse(config_file.read(path, InventoryError, "inventory"), path)


def parse(text: str, path: Path) -> Inventory:
    """As `load`, from text."""
    reading = config_file.examine(text, _File)
    if reading.value is None:
        raise InventoryError(config_file.first(reading.problems, path))
    read = reading.value
    read_only = read.read_only or looks_only()
    hosts = {
        name: replace(_host(name, entry), read_only=read_only) for name, entry in read.hosts.items()
    }
    return Inventory(
        path=path,
        hosts=MappingProxyType(hosts),
        observer=Path(read.observer) if read.observer else None,
        stores=MappingProxyType(
            {name: StorePlace(name=name, url=url) for name, url in read.stores.items()}
        ),
        lease=read.lease,
        webhooks=tuple(
            Webhook(url=one.url, secret_file=Path(one.secret_file) if one.secret_file else None)
            for one in read.webhooks
        ),
        read_only=read_only,
    )


def _host(name: str, entry: _Host) -> Host:
    ssh = None
    if entry.ssh is not None:
        ssh = SshAddress(
            address=entry.ssh.address,
            user=entry.ssh.user,
            port=entry.ssh.port,
            key_file=Path(entry.ssh.key_file) if entry.ssh.key_file else None,
            known_hosts=Path(entry.ssh.known_hosts) if entry.ssh.known_hosts else None,
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
        agent_state=entry.agent_state,
        fence=_topology(entry.fence),
    )


def _topology(entry: _Fence | _FenceLevels | None) -> FenceTopology | None:
    if entry is None:
        return None
    levels = [[entry]] if isinstance(entry, _Fence) else entry.levels
    return FenceTopology(tuple(tuple(_device(one) for one in level) for level in levels))


def _device(entry: _Fence) -> FenceDevice:
    options = dict(entry.options)
    file = options.pop(fencing.PASSWORD_FILE, None)
    return FenceDevice(
        agent=entry.agent, options=MappingProxyType(options),
        password_file=None if file is None else Path(_password_file(file)),
    )  # fmt: skip
