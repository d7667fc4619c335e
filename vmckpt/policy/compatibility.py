"""Find settings of a policy that QEMU or libvirt does not support, or cannot combine. Pure.

Combinations that no version supports are found when a policy is read (`impossible`); those that
depend on versions and on the guest are found before a migration (`conflicts`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vmckpt.model.known_problems import Version, version
from vmckpt.model.migration import Compression, Mode
from vmckpt.policy.model import Compress, Policy, Tls

_ONE_STREAM = (Compression.XBZRLE, Compression.MT)
_MANY_STREAMS = (Compression.ZLIB, Compression.ZSTD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """The versions on a host, such as "7.2.22" and "9.0.0"."""

    qemu: str
    libvirt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A setting that conflicts with another setting, with a version, or with the guest."""

    code: str
    """A stable identifier, which tests and scripts may match."""
    text: str
    hint: str
    keys: tuple[str | int, ...]
    """The path of the setting's key in the policy's file."""
    optional: bool = False
    """The migration is possible, but without the feature that `text` names, or with the drawback
    that `text` describes."""


def impossible(policy: Policy) -> tuple[Conflict, ...]:
    """Return the conflicts in a policy that exist with every version of QEMU and libvirt."""
    return (*_zero_copy(policy), *_compression(policy))


def conflicts(
    policy: Policy,
    *,
    source: Versions,
    target: Versions,
    host_devices: bool = False,
    copied_disks: bool = False,
    huge_pages: bool = False,
    file_backed_memory: bool = False,
) -> tuple[Conflict, ...]:
    """Return all conflicts between a policy, two hosts and a guest.

    `host_devices`, `huge_pages`: the guest has host devices, or huge pages. `copied_disks`: the
    migration copies disks. `file_backed_memory`: the guest's memory is a file on a disk, not on
    tmpfs or hugetlbfs.
    """
    return (
        *impossible(policy),
        *_by_version(policy, source, target),
        *_postcopy_of_guest(policy, host_devices, huge_pages, file_backed_memory),
        *_stopped(policy, copied_disks),
    )


def _compresses_later(policy: Policy) -> int | None:
    """Return the number (from 0) of the first rule that enables xbzrle, or None."""
    return next((i for i, rule in enumerate(policy.rules) if isinstance(rule.do, Compress)), None)


def _zero_copy(policy: Policy) -> Iterator[Conflict]:
    how = policy.transport
    if not how.zero_copy:
        return
    key = ("transport", "zero_copy")
    if how.connections == 1:
        yield Conflict(
            code="zero-copy-needs-connections", keys=key,
            text="zero_copy needs parallel connections",
            hint="write connections: 2 or more, or zero_copy: false",
        )  # fmt: skip
    if how.tls is not Tls.OFF:
        yield Conflict(
            code="zero-copy-with-tls", keys=key,
            text=f"zero_copy cannot be encrypted, and tls is {how.tls}",
            hint="write tls: off if the network is trusted, or zero_copy: false",
        )  # fmt: skip
    if how.compression is not Compression.NONE or _compresses_later(policy) is not None:
        yield Conflict(
            code="zero-copy-with-compression", keys=key,
            text="zero_copy sends pages unchanged, so they cannot be compressed",
            hint="use either zero_copy or compression",
        )  # fmt: skip


def _compression(policy: Policy) -> Iterator[Conflict]:
    how, key = policy.transport, ("transport", "compression")
    if how.compression in _MANY_STREAMS and how.connections == 1:
        yield Conflict(
            code="compression-needs-connections", keys=key,
            text=f"compression {how.compression} needs parallel connections",
            hint="write connections: 2 or more, or compression: xbzrle",
        )  # fmt: skip
    if how.compression in _ONE_STREAM and how.connections > 1:
        yield Conflict(
            code="compression-with-connections", keys=key,
            text=f"compression {how.compression} works only over one connection,"
            f" but connections is {how.connections}",
            hint="write connections: 1, or compression: zstd",
        )  # fmt: skip
    if how.compression is Compression.MT and policy.may_switch_early:
        yield Conflict(
            code="mt-with-post-copy", keys=key,
            text="compression mt cannot be combined with post-copy",
            hint="write compression: xbzrle or none, or mode: precopy",
        )  # fmt: skip
    rule = _compresses_later(policy)
    if rule is not None and how.connections > 1:
        yield Conflict(
            code="compress-with-connections", keys=("converge", "rules", rule, "do"),
            text=f"compress (xbzrle) works only over one connection,"
            f" but connections is {how.connections}",
            hint="write connections: 1, or remove the rule",
        )  # fmt: skip


def _by_version(policy: Policy, source: Versions, target: Versions) -> Iterator[Conflict]:
    how, early = policy.transport, policy.may_switch_early
    qemus = version(source.qemu), version(target.qemu)
    libvirts = version(source.libvirt), version(target.libvirt)
    qemu, libvirt = _shown(min(qemus)), _shown(min(libvirts))
    if how.connections > 1 and early and min(qemus) < (10, 1):
        yield Conflict(
            code="connections-with-post-copy", keys=("transport", "connections"),
            text=f"post-copy over {how.connections} connections needs QEMU 10.1 on both hosts,"
            f" but one host has {qemu}",
            hint="write connections: 1, or use a policy without post-copy",
            optional=policy.mode is not Mode.POSTCOPY,
        )  # fmt: skip
    if how.compression is Compression.MT and max(qemus) >= (9, 1):
        yield Conflict(
            code="mt-is-gone", keys=("transport", "compression"),
            text=f"compression mt was removed in QEMU 9.1, and one host has {_shown(max(qemus))}",
            hint="write compression: zstd and connections: 2 or more",
        )  # fmt: skip
    if how.compression in _MANY_STREAMS and min(libvirts) < (9, 4):
        yield Conflict(
            code="compression-needs-newer-libvirt", keys=("transport", "compression"),
            text=f"compression {how.compression} needs libvirt 9.4 on both hosts,"
            f" but one host has {libvirt}",
            hint="write compression: none, or xbzrle with connections: 1",
        )  # fmt: skip
    if how.zero_copy and (min(libvirts) < (8, 5) or min(qemus) < (7, 1)):
        yield Conflict(
            code="zero-copy-needs-newer", keys=("transport", "zero_copy"),
            text="zero_copy needs libvirt 8.5 and QEMU 7.1 on both hosts,"
            f" but the oldest versions are {libvirt} and {qemu}",
            hint="write zero_copy: false",
        )  # fmt: skip
    if early and min(libvirts) < (8, 5):
        yield Conflict(
            code="recovery-needs-newer-libvirt", keys=("on_postcopy_broken",),
            text="resuming a broken post-copy needs libvirt 8.5 on both hosts,"
            f" but one host has {libvirt}",
            hint="use a policy without post-copy if the network may fail",
            optional=True,
        )  # fmt: skip


def _postcopy_of_guest(
    policy: Policy, host_devices: bool, huge_pages: bool, file_backed_memory: bool
) -> Iterator[Conflict]:
    if not policy.may_switch_early:
        return
    optional = policy.mode is not Mode.POSTCOPY
    if host_devices:
        yield Conflict(
            code="post-copy-with-host-devices", keys=("mode",),
            text="post-copy cannot be used: the guest has host devices",
            hint="use a policy without post-copy, such as never-postcopy",
            optional=optional,
        )  # fmt: skip
    if file_backed_memory:
        yield Conflict(
            code="post-copy-with-file-backed-memory", keys=("mode",),
            text="post-copy cannot be used: the guest's memory is a file on a disk",
            hint="back the memory with memfd or tmpfs, or use a policy without post-copy",
            optional=optional,
        )  # fmt: skip
    if huge_pages:
        yield Conflict(
            code="post-copy-with-huge-pages", keys=("mode",),
            text="post-copy fetches a missing page as a whole, so with huge pages the guest waits"
            " longer for each page (1 GiB over 10 Gbit/s: about a second)",
            hint="use a policy without post-copy if the guest has pages of 1 GiB",
            optional=True,
        )  # fmt: skip


def _stopped(policy: Policy, copied_disks: bool) -> Iterator[Conflict]:
    if policy.mode is Mode.STOP_AND_COPY and copied_disks:
        yield Conflict(
            code="stopped-while-disks-are-copied", keys=("mode",),
            text="in mode stop-and-copy, the guest is also paused while its disks are copied",
            hint="use mode precopy with a pause rule",
            optional=True,
        )  # fmt: skip


def _shown(version: Version) -> str:
    return ".".join(map(str, version)) or "an unknown version"
