"""The inventory, hosts.yaml: the hosts and how to reach them.

hosts:
  alpha:
    uri: qemu+ssh://root@alpha/system     # required; as seen from the controller
    peer_uri: qemu+tls://alpha/system     # as seen from the other hosts
    ssh: {address: alpha, user: root, port: 22, key_file: ~/.ssh/id_ed25519}
    migration_address: 10.1.0.11
    labels: {rack: a1}
    storage: [/var/lib/libvirt/images]
    networks: [br0]
    agent_state: /var/lib/vmckpt/agent    # directory on the host where agents keep state
    fence:                                # optional: powers the host off before a failover
      agent: fence_ipmilan                # ClusterLabs fence agent on the controller, or a path
      options:                            # the fence agent's options, as strings
        {ip: 10.9.0.11, username: admin, lanplus: "1", password_file: /etc/vmckpt/alpha.password}
    # or levels, tried in turn; a level succeeds if all of its devices report off:
    # fence: {levels: [[{agent: fence_ipmilan, ...}], [{agent: fence_apc, ...}, {agent: ...}]]}
stores:                                   # optional: where snapshots are kept
  near: /srv/vmckpt                       # the default (first store); a directory all hosts mount
  far: s3://bucket/vmckpt?endpoint=https://s3.example.com
lease: postgresql://vmckpt@pg/vmckpt      # optional: the lease store; not on any of these hosts
observer: /run/observer.sock              # optional: socket of a plugin that observes guests
webhooks:                                 # optional: URLs to which `vmckpt run` sends alerts
  - url: https://alerts.example.com/vmckpt
    secret_file: /etc/vmckpt/webhook.secret
alertmanagers:                            # optional: Alertmanagers to which it sends alerts
  - {url: "http://alerts.example.com:9093", username: vmckpt, password_file: /etc/vmckpt/password}
apprise: /etc/vmckpt/apprise.conf         # optional: file with Apprise URLs, only for root
read_only: false                          # true: forbid all changes
roles:                                    # optional: without roles, every user may do everything
  view: {groups: [support]}               # run commands that change nothing
  move: {groups: [operators]}             # move, protect and snapshot guests
  destroy: {users: [ann], groups: [wheel]}  # also delete snapshots, replace guests, fail over
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from vmckpt.errors import InventoryError, ReadOnly
from vmckpt.model import fencing
from vmckpt.model.disk import StorePlace
from vmckpt.model.fencing import FenceDevice, FenceTopology
from vmckpt.model.host import AGENT_STATE, Host, SshAddress
from vmckpt.model.roles import Members, Role, Roles
from vmckpt.model.webhook import AlertmanagerPlace, Webhook
from vmckpt.util import config_file

READ_ONLY = "VMCKPT_READ_ONLY"
VARIABLE = "VMCKPT_INVENTORY"
_AGENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|/[^\s]+")
_URI = re.compile(r"[a-z]+(\+[a-z0-9]+)?://.*")


def _uri(text: str) -> str:
    if _URI.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is not a libvirt URI; use a URI like qemu+ssh://root@alpha/system"
        )
    try:
        _ = urlsplit(text).port  # urlsplit checks brackets immediately, the port only on access
    except ValueError as exc:
        raise ValueError(f"{text!r} is not a libvirt URI: {exc}") from None
    return text


def _store(text: str) -> str:
    if text.startswith("s3://"):
        if not urlsplit(text).netloc:
            raise ValueError(f"{text!r} has no bucket; use a URL like s3://bucket/prefix")
        return text
    if not text.startswith("/"):
        raise ValueError(f"{text!r} is neither an absolute path nor s3://bucket/prefix")
    return text


def _lease(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("postgresql", "postgres") or not parts.hostname:
        # The message omits the URL, which may contain a password.
        raise ValueError(
            "not a PostgreSQL URL; use a URL like postgresql://user@lease-store/database"
        )
    return text


def _http(text: str) -> str:
    # The message omits the URL, which may contain a secret.
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError("not a URL; use a URL like https://alerts.example.com/vmckpt")
    return text


def _name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is not a valid host name; use one line of printable characters")
    return text


def _store_name(text: str) -> str:
    # Directories on the hosts are named after the store.
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError(
            f"{text!r} is not a valid store name; use at most 64 letters, digits, dots, - and _,"
            " and do not begin with a dot"
        )
    return text


def _file(text: str) -> str:
    try:
        return str(Path(text).expanduser()) if text else text
    except RuntimeError:
        raise ValueError(f"{text!r}: unknown user; write an absolute path") from None


def _password_file(text: str) -> str:
    path = os.path.expanduser(text)  # noqa: PTH111 – Path.expanduser puts the text in its error
    if not path.startswith("/"):
        raise ValueError("password_file must be an absolute path")
    return path


def _fence(value: Any) -> Any:
    """Check a fence device, or levels of fence devices. Raises ValueError.

    Messages contain no values, since a value may be a password.
    """
    if value is None or _kind_of_fence(value) == "(device)":
        return value if value is None else _fence_device(value)
    levels = value["levels"]
    if not isinstance(levels, list) or not all(isinstance(one, list) for one in levels):
        raise ValueError("levels must be a list of levels, each a list of devices")
    if not levels or not all(levels):
        raise ValueError("levels must not be empty, and each level must have at least one device")
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
        raise ValueError("must have the form {agent: NAME, options: {name: value, ...}}")
    agent = value.get("agent", "fence_ipmilan")
    if not isinstance(agent, str) or not _AGENT.fullmatch(agent):
        raise ValueError(
            "agent must be the name of a fence agent, like fence_ipmilan, or its absolute path"
        )
    options = value.get("options", {})
    if not isinstance(options, dict):
        raise ValueError("options must be a mapping like {ip: 10.9.0.11}")
    for name, one in options.items():
        fencing.check_option(name, one)
    if {fencing.PASSWORD, fencing.PASSWORD_FILE} <= set(options):
        raise ValueError("password and password_file are mutually exclusive")
    if fencing.PASSWORD_FILE in options:
        _password_file(options[fencing.PASSWORD_FILE])
    return value


def _roles(value: Any) -> Any:
    if not value:  # such a section might be meant to allow everything, or nothing
        raise ValueError("no role is given; remove roles, or write {destroy: {users: [NAME]}}")
    return value


def _account(text: str) -> str:
    if not text or text.startswith(("@", "%")) or not text.isprintable():
        raise ValueError(f"{text!r} is not a name of a user or group; write the name alone")
    return text


_Account = Annotated[str, AfterValidator(_account)]
_RoleName = Literal["view", "move", "destroy"]
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


class _Alertmanager(_Strict):
    url: Annotated[str, AfterValidator(_http)]
    username: str | None = None
    password_file: _Path | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.username is None) != (self.password_file is None):
            raise ValueError("username and password_file need each other")
        return self


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


class _Members(_Strict):
    users: list[_Account] = []
    groups: list[_Account] = []


class _File(_Strict):
    hosts: Annotated[dict[_Name, _Host], Field(min_length=1)]
    stores: dict[
        Annotated[str, AfterValidator(_store_name)], Annotated[str, AfterValidator(_store)]
    ] = {}
    lease: Annotated[str, AfterValidator(_lease)] | None = None
    observer: str | None = None
    webhooks: list[_Webhook] = []
    alertmanagers: list[_Alertmanager] = []
    apprise: _Path | None = None
    read_only: bool = False
    roles: Annotated[dict[_RoleName, _Members] | None, BeforeValidator(_roles)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The contents of a valid hosts.yaml."""

    path: Path
    hosts: Mapping[str, Host]
    observer: Path | None
    stores: Mapping[str, StorePlace] = field(default_factory=lambda: MappingProxyType({}))
    """Snapshot stores by name. The first is the default."""
    lease: str | None = None
    """PostgreSQL URL of the lease store; None if there is none."""
    webhooks: tuple[Webhook, ...] = ()
    alertmanagers: tuple[AlertmanagerPlace, ...] = ()
    apprise: Path | None = None
    """File with the URLs of Apprise services."""
    read_only: bool = False
    """Whether all changes are forbidden."""
    roles: Roles | None = None
    """The roles of users; None: every user may do everything."""

    @property
    def sends_alerts(self) -> bool:
        """Whether there is any receiver of alerts."""
        return bool(self.webhooks or self.alertmanagers or self.apprise)

    def may_act(self) -> None:
        """Raise ReadOnly if changes are forbidden, by the inventory or the environment."""
        may_act()
        if self.read_only:
            raise ReadOnly(
                f"{self.path} has read_only: true; nothing was changed",
                hint="use an inventory without read_only",
            )

    def store(self, name: str | None = None) -> StorePlace:
        """Return the named store; None: the first store. Raises InventoryError if missing."""
        if not self.stores:
            raise InventoryError(
                f"{self.path} defines no snapshot store",
                hint="add a line like stores: {near: /srv/vmckpt}",
            )
        if name is None:
            return next(iter(self.stores.values()))
        if name in self.stores:
            return self.stores[name]
        raise InventoryError(
            f"{self.path}: no store {name!r}{config_file.likely(name, self.stores)}"
        )

    def host(self, name: str) -> Host:
        """Return the named host. Raises InventoryError, which suggests a similar name, if any."""
        if name in self.hosts:
            return self.hosts[name]
        raise InventoryError(f"{self.path}: no host {name!r}{config_file.likely(name, self.hosts)}")


def find(explicit: Path | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Find the inventory: `explicit`, else the file named by VMCKPT_INVENTORY, else ./hosts.yaml.

    Returns None if there is no inventory.
    """
    if explicit is not None:
        return explicit
    if named := environment.get(VARIABLE):
        return Path(named)
    here = Path("hosts.yaml")
    return here if here.exists() else None


def looks_only(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether VMCKPT_READ_ONLY forbids changes."""
    return environment.get(READ_ONLY, "") not in ("", "0", "no", "false")


def may_act() -> None:
    """Raise ReadOnly if VMCKPT_READ_ONLY forbids changes."""
    if looks_only():
        raise ReadOnly(
            "read-only mode forbids this command; nothing was changed",
            hint=f"omit --read-only, and unset {READ_ONLY}",
        )


def load(path: Path) -> Inventory:
    """Read hosts.yaml. Raises InventoryError with the file, the line, the key and a suggestion."""
    missing = f"write it (see docs/hosts.md), or correct {VARIABLE} or --inventory"
    return parse(config_file.read(path, InventoryError, "inventory", if_missing=missing), path)


def parse(text: str, path: Path) -> Inventory:
    """Parse the text of hosts.yaml; `path` is its name in errors. Raises InventoryError."""
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
        alertmanagers=tuple(
            AlertmanagerPlace(
                url=one.url,
                username=one.username,
                password_file=Path(one.password_file) if one.password_file else None,
            )
            for one in read.alertmanagers
        ),
        apprise=Path(read.apprise) if read.apprise else None,
        read_only=read_only,
        roles=_parsed_roles(read.roles),
    )


def _parsed_roles(entries: Mapping[_RoleName, _Members] | None) -> Roles | None:
    if entries is None:
        return None
    members = {
        Role(name): Members(users=frozenset(one.users), groups=frozenset(one.groups))
        for name, one in entries.items()
    }
    return Roles(members=MappingProxyType(members))


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
