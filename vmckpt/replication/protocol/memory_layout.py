"""The blocks of a guest's memory, in the order in which the agents number them. Pure.

Guest and standby have the same blocks. A DIMM that is plugged into the guest is plugged into the
standby as well, before the primary sends any of its pages.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from vmckpt.replication.protocol.messages import damaged

_NAME = re.compile(r"dimm\d{1,4}|ua-[A-Za-z0-9_-]{1,64}")
"""The aliases that libvirt gives to DIMMs, and accepts for DIMMs from users."""
_MOST = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimm:
    """A DIMM, as QEMU describes it."""

    name: str
    """libvirt's alias, which is QEMU's ID of the device."""
    size: int
    """In bytes."""
    node: int
    """NUMA node of the guest."""
    slot: int
    address: int
    """Guest physical address of the memory."""

    @classmethod
    def from_qmp(cls, told: Mapping[str, Any]) -> Self:
        """Parse one "dimm" of QMP `query-memory-devices`."""
        return cls(
            name=str(told.get("id", "")), size=int(told["size"]), node=int(told["node"]),
            slot=int(told["slot"]), address=int(told["addr"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout that the standby's memory must have."""

    blocks: tuple[tuple[str, int], ...]
    """Name and size of each block, in bytes."""
    dimms: tuple[Dimm, ...] = ()
    """DIMMs that the standby may lack."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse what the primary sent. Raises Damaged."""
        try:
            told = json.loads(data)
            blocks = tuple((str(name), _number(size)) for name, size in told["blocks"])
            return cls(blocks=blocks, dimms=tuple(_dimm(one) for one in told["dimms"]))
        except (ValueError, TypeError, LookupError, RecursionError) as exc:
            raise damaged(f"an invalid list of memory blocks: {exc}") from exc


def difference(wanted: Iterable[tuple[str, int]], found: Iterable[tuple[str, int]]) -> str | None:
    """Return how the standby's blocks differ from the guest's; None: they are the same."""
    guest, standby = list(wanted), list(found)
    if guest == standby:
        return None
    missing = [name for name, size in guest if (name, size) not in standby]
    extra = [name for name, size in standby if (name, size) not in guest]
    told = [f"lacks {', '.join(missing)}"] if missing else []
    told += [f"also has {', '.join(extra)}"] if extra else []
    return f"the standby {' and '.join(told) or 'has the same blocks in another order'}"


def _dimm(told: Mapping[str, Any]) -> Dimm:
    name = str(told["name"])
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a DIMM")
    numbers = {key: _number(told[key]) for key in ("size", "node", "slot", "address")}
    return Dimm(name=name, **numbers)


def _number(told: object) -> int:
    if not isinstance(told, int) or isinstance(told, bool) or not 0 <= told < _MOST:
        raise ValueError(f"{told!r} is not a valid number")
    return told
