"""Read a fleet from a file, to plan for hosts that do not exist or must not be contacted.

hosts:
- {name: "h[01-40]", memory: 512GiB, cpus: 64, link: 25gbit, labels: {rack: r1}}
guests:                                  # distributed to the named hosts in turn
- {name: "web[1-200]", host: "h[01-10]", memory: 8GiB, vcpus: 4, dirty: 50MiB/s, apart: [web]}
- {name: db1, host: h01, memory: 64GiB, needs: {rack: r1}, stays: it holds a GPU}
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vmckpt.errors import BadInput
from vmckpt.evacuation.plan.fleet import Fleet, Needs, Place, Tenant
from vmckpt.evacuation.plan.inventory import OVERHEAD
from vmckpt.policy.values import Size
from vmckpt.units import Bytes, BytesPerSecond, parse_rate
from vmckpt.util import config_file

_MOST = 100_000
_SPAN = re.compile(r"(.*)\[(\d{1,6})-(\d{1,6})\](.*)")


def _names(text: object) -> tuple[str, ...]:
    """Return the names that a text stands for: "h[08-10]" is h08, h09 and h10.

    Raises ValueError.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a name; put it in quotes")
    found = _SPAN.fullmatch(text)
    if found is None:
        if not text.strip() or not text.isprintable() or set(text) & set("[]"):
            raise ValueError(f"{text!r} is not a name; use a name like h1 or h[01-40]")
        return (text,)
    before, first, last, after = found.groups()
    if not 0 <= int(last) - int(first) < _MOST:
        raise ValueError(f"{text!r} is an empty range, or too large")
    numbers = range(int(first), int(last) + 1)
    return tuple(f"{before}{one:0{len(first)}}{after}" for one in numbers)


def _rate(text: object) -> BytesPerSecond:
    return parse_rate(str(text))


def _link(text: object) -> BytesPerSecond:
    if (found := _rate(text)) <= 0:
        raise ValueError(f"{text!r}: a link's bandwidth must be greater than 0")
    return found


_Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
_Rate = Annotated[BytesPerSecond, BeforeValidator(_rate)]
_Link = Annotated[BytesPerSecond, BeforeValidator(_link)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Hosts(_Strict):
    name: _Names
    memory: Size
    cpus: Annotated[int, Field(ge=1)]
    link: _Link = BytesPerSecond(1_250_000_000)
    labels: dict[str, str] = {}
    closed: str | None = None
    """Why no guest may be placed on these hosts; None: guests may be placed."""


class _Guests(_Strict):
    name: _Names
    host: _Names
    memory: Size
    vcpus: Annotated[int, Field(ge=1)] = 1
    dirty: _Rate = BytesPerSecond(0)
    apart: list[str] = []
    needs: dict[str, str] = {}
    priority: int = 0
    stays: str | None = None
    """Why these guests cannot be moved; None: they can be moved."""


class _File(_Strict):
    hosts: Annotated[list[_Hosts], Field(min_length=1)]
    guests: list[_Guests] = []


def load(path: Path, overcommit: float) -> Fleet:
    """Read a fleet. `overcommit`: vCPUs allowed for each CPU of a host. Raises BadInput."""
    reading = config_file.examine(config_file.read(path, BadInput, "fleet"), _File)
    if reading.value is None:
        raise BadInput(config_file.first(reading.problems, path))
    wrong = _Wrong(path, reading.lines)
    value = reading.value
    _once("hosts", value.hosts, wrong)
    _once("guests", value.guests, wrong)
    known = {name for one in value.hosts for name in one.name}
    hosts = [made for one in value.hosts for made in _places(one, overcommit)]
    guests: list[Tenant] = []
    for number, entry in enumerate(value.guests):
        for host in entry.host:
            if host not in known:
                text = f"no host {host!r}{config_file.likely(host, known)}"
                raise wrong(text, "guests", number, "host")
        guests += _tenants(entry)
    return Fleet(tuple(hosts), tuple(guests))


def _places(entry: _Hosts, overcommit: float) -> Sequence[Place]:
    return [
        Place(
            name=name, memory=entry.memory, cpus=entry.cpus * overcommit, link=entry.link,
            labels=MappingProxyType(entry.labels), closed=entry.closed,
        )
        for name in entry.name
    ]  # fmt: skip


def _tenants(entry: _Guests) -> Sequence[Tenant]:
    return [
        Tenant(
            name=name, host=entry.host[number % len(entry.host)],
            memory=Bytes(entry.memory + OVERHEAD), size=entry.memory, cpus=float(entry.vcpus),
            dirty=entry.dirty, apart=frozenset(entry.apart), priority=entry.priority,
            needs=Needs(labels=_pairs(entry.needs)), stays=entry.stays,
        )
        for number, name in enumerate(entry.name)
    ]  # fmt: skip


def _pairs(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def _once(key: str, entries: Sequence[_Hosts | _Guests], wrong: "_Wrong") -> None:
    """Check that no name occurs twice in a list of the file. `key`: the list's key."""
    known: set[str] = set()
    for number, entry in enumerate(entries):
        for name in entry.name:
            if name in known:
                text = f"{key.removesuffix('s')} {name!r} occurs twice"
                raise wrong(text, key, number, "name", hint="rename one of them")
            known.add(name)


class _Wrong:
    """Makes errors that name the file and the line."""

    def __init__(self, path: Path, lines: config_file.Lines) -> None:
        self._path = path
        self._lines = lines

    def __call__(self, text: str, *keys: config_file.Key, hint: str | None = None) -> BadInput:
        """Return an error at a path of keys."""
        problem = config_file.Problem(self._lines.of(*keys), text)
        return BadInput(problem.at(self._path), hint=hint)
