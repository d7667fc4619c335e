"""Determine whether two names in the inventory refer to one host. Pure.

libvirt's host UUID alone is not enough: hosts that were cloned, or whose firmware has no UUID of
its own, can have the same one. One libvirtd also has one host name, one set of running guests, and
one set of CPU counters, which only increase.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from vmckpt.errors import InventoryError

_SLACK = 50_000_000
"""Tolerance of a CPU counter, in nanoseconds. The kernel's counters are coarse."""
_FAR = 10_000_000_000
"""Counters that differ by more, in nanoseconds, cannot be those of one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What one libvirtd reports about itself at one moment."""

    uuid: str
    """libvirt's host UUID."""
    hostname: str
    running: Mapping[str, int]
    """IDs of the running guests, by UUID. libvirtd numbers its guests in the order of starts."""
    cpu: Mapping[str, int]
    """CPU time since the host started, in nanoseconds, by kind; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameUuid:
    """Two names in the inventory whose hosts have the same libvirt host UUID."""

    first: str
    second: str
    one: bool | None
    """Whether the names refer to one host; None: unknown."""
    why: str = ""
    """The difference between two hosts, or why it is unknown; empty for one host."""

    @property
    def text(self) -> str:
        """A description in one line."""
        if self.one:
            return f"{self.first} and {self.second} are one host"
        if self.one is None:
            return f"it is unknown whether {self.first} and {self.second} are one host: {self.why}"
        return (
            f"{self.first} and {self.second} have the same libvirt host UUID, but are two hosts:"
            f" {self.why}"
        )

    @property
    def hint(self) -> str:
        """What to do about it."""
        if self.one:
            return f"leave {self.first} or {self.second} out of hosts.yaml"
        if self.one is None:
            return f"run vmckpt doctor {quote(self.first)} {quote(self.second)}"
        return (
            f"on {self.second}, set host_uuid in /etc/libvirt/libvirtd.conf to the output of"
            " uuidgen, then restart libvirtd"
        )

    def error(self) -> InventoryError:
        """Return the error of a command that cannot tell the two names apart."""
        return InventoryError(f"{self.text}; nothing was changed", hint=self.hint)


def judge(
    names: tuple[str, str], before: Sighting, other: Sighting, after: Sighting
) -> SameUuid | None:
    """Compare two hosts. Returns None if their UUIDs differ or are unknown.

    `before` and `after` are of the first host, and surround `other`, which is of the second: on one
    host, what `other` reports lies between them.
    """
    if before.uuid != other.uuid or not before.uuid:
        return None
    first, second = names
    if (one := _short(before.hostname)) != (two := _short(other.hostname)):
        return SameUuid(
            first=first, second=second, one=False, why=f"their host names are {one} and {two}"
        )
    off = _apart(before.cpu, other.cpu, after.cpu)
    if off is None:
        why = "libvirt reports no CPU times"
    elif off > _FAR:
        why = "they have used different amounts of CPU time since they started"
        return SameUuid(first=first, second=second, one=False, why=why)
    elif off > _SLACK:
        why = "their CPU times are similar, but not the same"
    elif other.running not in (before.running, after.running):
        why = "they report different guests"
    else:
        return SameUuid(first=first, second=second, one=True)
    return SameUuid(first=first, second=second, one=None, why=why)


def _apart(
    before: Mapping[str, int], other: Mapping[str, int], after: Mapping[str, int]
) -> int | None:
    """Return by how much a counter of `other` is outside the range of the first host's counters.

    In nanoseconds, the largest of all kinds; None if unknown.
    """
    if not before or not before.keys() == other.keys() == after.keys():
        return None
    return max(max(before[kind] - other[kind], other[kind] - after[kind]) for kind in before)


def _short(hostname: str) -> str:
    # libvirt adds the domain only if it can be looked up, so one host may have both forms.
    return hostname.partition(".")[0].lower()


def left_out(found: Iterable[SameUuid]) -> frozenset[str]:
    """Return the names to ignore, so that each host remains under one name."""
    return frozenset(one.second for one in found if one.one)


def require_distinct(found: Sequence[SameUuid]) -> None:
    """Raise InventoryError if two names are, or may be, one host. Certain cases come first."""
    for wrong in (True, None):
        for one in found:
            if one.one is wrong:
                raise one.error()
