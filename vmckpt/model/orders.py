"""What libvirt must be told to move a guest."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import NoneType
from typing import Any

from vmckpt.units import Bytes, BytesPerSecond


class Driver(StrEnum):
    """Who drives a migration."""

    PEER_TO_PEER = "peer-to-peer"
    """The source's libvirtd: it goes on when the controller dies."""
    CLIENT = "client-driven"
    """The controller: it ends when the controller dies; before post-copy without harm."""
    AGENTS = "by agents"
    """Agents on both hosts, as for a protection; the controller says when to switch."""


class Mode(StrEnum):
    """How a guest's memory gets to the target."""

    AUTO = "auto"
    """Whichever of the others the forecast finds best within the policy."""
    PRECOPY = "precopy"
    """All memory before the switch, pass after pass."""
    POSTCOPY = "postcopy"
    """The guest runs on the target as soon as the first pass is over; the rest follows."""
    HYBRID = "hybrid"
    """Pre-copy, and post-copy from the point where the policy's rules say so."""
    STOP_AND_COPY = "stop-and-copy"
    """The guest stands still while its memory is copied."""
    CHECKPOINT = "checkpoint"
    """Epochs, as of a protection, until the last one is small enough; not by libvirt."""

    @property
    def may_switch_early(self) -> bool:
        """Whether the order must allow post-copy."""
        return self in (Mode.POSTCOPY, Mode.HYBRID)


class Compression(StrEnum):
    """How the memory stream is made smaller."""

    NONE = "none"
    XBZRLE = "xbzrle"
    """Differences to pages sent before; needs a cache on the source."""
    MT = "mt"
    """Each page by zlib in threads; gone from QEMU 9.1 on."""
    ZLIB = "zlib"
    """Each of the parallel connections by zlib."""
    ZSTD = "zstd"
    """Each of the parallel connections by zstd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConverge:
    """How QEMU slows a guest down that writes faster than the link carries; per cent of CPU."""

    initial: int
    increment: int
    at_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """Everything libvirt must be told to move a guest."""

    driver: Driver
    persistent: bool
    """The guest is defined on the source: define it on the target and not on the source."""
    autostart: bool
    """Start the guest with the target host from now on; libvirt does not carry that over."""
    storage_proven: bool
    """The disks (but for `copied_disks`) were seen to be the same files on both hosts, so libvirt
    need not doubt it."""
    bandwidth: BytesPerSecond | None
    """None: no limit."""
    live: bool = True
    """False: the guest stands still meanwhile (stop-and-copy)."""
    post_copy: bool = False
    """It may be switched to post-copy while it runs."""
    postcopy_bandwidth: BytesPerSecond | None = None
    """Limit after that switch; None: none."""
    auto_converge: AutoConverge | None = None
    """None: QEMU may not slow the guest down."""
    tls_name: str | None = None
    """The name that the target's certificate must carry; None: the stream is not encrypted."""
    connections: int = 1
    """More than one: the pages travel over that many (QEMU's multifd)."""
    zero_copy: bool = False
    compression: Compression = Compression.NONE
    compression_level: int | None = None
    xbzrle_cache: Bytes | None = None
    """None: QEMU's 64 MiB."""
    copied_disks: tuple[str, ...] = ()
    """Disks ("vda") that both hosts do not share: copied over NBD, to images made there before."""
    resume: bool = False
    """Go on with a post-copy that broke; all the rest must be as it was."""

    def as_json(self) -> dict[str, Any]:
        """For the journal: a broken post-copy is resumed with the same order.

        Without the guest's definitions: a resumed stream needs none, and they may hold passwords.
        """
        return asdict(self) | {"target_xml": None, "target_definition": None}

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "MoveOrder":
        """The order again. Raises TypeError, KeyError or ValueError if that is none."""
        _check(stored)
        slowing = stored["auto_converge"]
        return MoveOrder(
            **{
                **stored,
                "driver": Driver(stored["driver"]),
                "compression": Compression(stored["compression"]),
                "copied_disks": tuple(stored["copied_disks"]),
                "auto_converge": None if slowing is None else AutoConverge(**slowing),
            }
        )

    target_xml: str | None = None
    """The running guest as the target must see it; None: as on the source."""
    target_definition: str | None = None
    """The guest as it is to be defined there; None: as on the source."""


_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("persistent", "autostart", "storage_proven", "live", "post_copy"), (bool,)),
    **dict.fromkeys(("zero_copy", "resume"), (bool,)),
    "connections": (int,),
    **dict.fromkeys(("bandwidth", "postcopy_bandwidth", "xbzrle_cache"), (int, NoneType)),
    "compression_level": (int, NoneType),
    **dict.fromkeys(("tls_name", "target_xml", "target_definition"), (str, NoneType)),
    "auto_converge": (dict, NoneType),
    "copied_disks": (list, tuple),
}
_MOST = 1 << 60


def _check(stored: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError if a stored order holds what no order has."""
    slowing = stored["auto_converge"] or {}
    for name, value in stored.items():
        kinds = _KINDS.get(name)
        # A bool is an int to Python.
        if kinds is not None and (not isinstance(value, kinds) or _is_wrong_bool(value, kinds)):
            raise TypeError(f"{name} is {str(value)[:40]!r}")
    for name, value in (*stored.items(), *slowing.items()):
        if isinstance(value, int) and not 0 <= value <= _MOST:
            raise ValueError(f"{name} is {str(value)[:40]}")
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in slowing.values()):
        raise TypeError("auto_converge is not in per cent")
    if not all(isinstance(disk, str) for disk in stored["copied_disks"]):
        raise TypeError("copied_disks are not names")


def _is_wrong_bool(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, bool) and bool not in kinds
