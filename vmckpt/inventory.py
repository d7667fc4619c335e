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

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vmckpt.errors import InventoryError
from vmckpt.model.hosts import Host, SshAddress

_MOST_BYTES = 1 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Ssh(_Strict):
    address: Annotated[str, Field(min_length=1)]
    user: str = "root"
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    key_file: str | None = None
    known_hosts: str | None = None


class _Host(_Strict):
    uri: Annotated[str, Field(pattern=r"^[a-z]+(\+[a-z0-9]+)?://")]
    peer_uri: Annotated[str, Field(pattern=r"^[a-z]+(\+[a-z0-9]+)?://")] | None = None
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
        raise InventoryError(f"{self.path}: no host {name!r}{_likely(name, list(self.hosts))}")


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
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InventoryError(f"{path}: larger than 1 MiB; that is no inventory")
        return parse(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InventoryError(f"{path}: {reason}") from exc


def parse(text: str, path: Path) -> Inventory:
    """As `load`, from text."""
    tree = None
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is not None:
            _refuse_tricks(tree, path)
        read = _File.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = f"{mark.line + 1}: " if mark else " "
        problem = getattr(exc, "problem", None) or str(exc).splitlines()[0]
        raise InventoryError(f"{path}:{line}{problem}") from exc
    except (ValueError, RecursionError) as exc:
        if not isinstance(exc, ValidationError):
            raise InventoryError(f"{path}: {exc}") from exc
        raise InventoryError(_complaint(exc, tree, path)) from exc
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


def _refuse_tricks(node: yaml.Node, path: Path) -> None:
    """Refuse aliases (a few lines of them can fill the memory) and keys written twice."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if id(here) in seen:
            raise InventoryError(f"{path}:{here.start_mark.line + 1}: aliases (&, *) are refused")
        seen.add(id(here))
        if isinstance(here, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in here.value:
                if key.value in keys:
                    line = key.start_mark.line + 1
                    raise InventoryError(f"{path}:{line}: {key.value!r} is written twice")
                keys.add(str(key.value))
                waiting.append(value)
        elif isinstance(here, yaml.SequenceNode):
            waiting.extend(here.value)


def _complaint(exc: ValidationError, tree: yaml.Node | None, path: Path) -> str:
    """One line for the first thing that is wrong."""
    error = exc.errors()[0]
    keys = [part for part in error["loc"] if part != "[key]"]
    line = _line_of(tree, keys)
    where = f"{path}:{line}: " + ".".join(str(key) for key in keys)
    more = f" (and {exc.error_count() - 1} more)" if exc.error_count() > 1 else ""
    if error["type"] == "extra_forbidden":
        return (
            f"{path}:{line}: unknown key {keys[-1]!r}{_likely(str(keys[-1]), _known(keys))}{more}"
        )
    if error["type"] == "missing":
        return f"{where} is missing{more}"
    if error["type"] == "string_pattern_mismatch":
        return f"{where}: {error['input']!r} is no libvirt URI, like qemu+ssh://root@alpha/system{more}"
    return f"{where}: {error['msg'].lower()}, not {_short(error['input'])}{more}"


def _known(keys: list[Any]) -> list[str]:
    """The keys that are allowed where the last of `keys` stands."""
    levels: dict[int, type[BaseModel]] = {1: _File, 3: _Host}
    return list(levels.get(len(keys), _Ssh).model_fields)


def _likely(word: str, words: list[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(words))}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _line_of(tree: yaml.Node | None, keys: list[Any]) -> int:
    """The line (from 1) of the deepest node that exists on the way of `keys`."""
    line, node = 1, tree
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                if name.value == str(key):
                    line, node = name.start_mark.line + 1, value
                    break
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
    return line
