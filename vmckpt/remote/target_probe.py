"""Probe what the target of a migration offers beyond files: addresses, ports, huge pages, devices.

The scripts only read, and print lines of the form `key value`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vmckpt.errors import RemoteError
from vmckpt.remote.ssh import Remote
from vmckpt.units import Bytes

_LISTENING = r"""
say() { printf '%s\n' "$1"; }
PATH=$PATH:/sbin:/usr/sbin
ip -o addr show 2>/dev/null | while read -r _ _ _ address _; do say "address ${address%%/*}"; done
say "nonlocal $(cat /proc/sys/net/ipv4/ip_nonlocal_bind 2>/dev/null)"
cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | while read -r _ local _ state _; do
    [ "$state" = 0A ] && say "port ${local##*:}"
done
say "default $(sed -n 's/^Hugepagesize: *\([0-9]*\) kB$/\1/p' /proc/meminfo)"
for pages in /sys/kernel/mm/hugepages/hugepages-*kB; do
    [ -d "$pages" ] || continue
    size=${pages##*-}
    count() { cat "$pages/$1_hugepages" 2>/dev/null || echo 0; }
    say "pages ${size%kB} $(count free) $(count resv) $(count nr_overcommit) $(count surplus)"
done
say end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetProbe:
    """What a host offers to a guest that arrives."""

    addresses: frozenset[str]
    """The host's IP addresses; empty if they could not be read."""
    any_address: bool
    """Programs may listen on addresses that the host does not have (ip_nonlocal_bind)."""
    ports: frozenset[int]
    """TCP ports on which programs listen."""
    free_pages: Mapping[int, Bytes]
    """Memory in free huge pages, by the pages' size in KiB, with pages that the kernel may add."""
    default_page: int | None
    """Size of the default huge page in KiB; None if unknown."""


async def look_at_target(remote: Remote) -> TargetProbe:
    """Read what the host offers. Raises RemoteError or HostKeyRefused."""
    answer = await remote.run(["sh", "-s"], text=_LISTENING)
    return parse(answer.out, remote.host.name)


def parse(text: str, host: str) -> TargetProbe:
    """Parse the script's answer. Raises RemoteError if it is invalid."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    pages = [line.split() for line in found.get("pages", [])]
    ports = found.get("port", [])
    sound = all(len(one) == 5 and all(map(str.isdecimal, one)) for one in pages)
    if "end" not in found or not sound or not all(re.fullmatch("[0-9A-F]{4}", p) for p in ports):
        raise RemoteError(
            f"{host}: looking at addresses and ports: invalid answer: {text[:80]!r}",
            host=host,
            hint="make sure that logins on the host print nothing",
        )
    default = found.get("default", [""])[0]
    return TargetProbe(
        addresses=frozenset(found.get("address", [])),
        any_address=found.get("nonlocal", [""])[0] == "1",
        ports=frozenset(int(port, 16) for port in ports),
        free_pages={
            int(size): Bytes(
                (max(0, int(free) - int(reserved)) + max(0, int(over) - int(surplus)))
                * int(size) * 1024
            )
            for size, free, reserved, over, surplus in pages
        },
        default_page=int(default) if default.isdecimal() else None,
    )  # fmt: skip


# Identifiers of type t10 are left out: they may contain only a serial number that is not unique.
# Cloned disks have the same LVM UUIDs, so that the disks below must have identifiers, too.
_IDENTITY = r"""
identity() {
    local sys=$1 id= part=
    if [ -e "$sys/partition" ]; then
        part="/part$(cat "$sys/partition")"
        sys=$(dirname "$(readlink -f "$sys")")
    fi
    for file in wwid device/wwid; do
        [ -r "$sys/$file" ] && id=$(cat "$sys/$file") && break
    done
    case $id in
    naa.* | eui.* | uuid.* | nvme.*) printf '%s%s' "$id" "$part"; return ;;
    esac
    rbd=/sys/bus/rbd/devices/${sys##*/rbd}
    case $sys in
    */rbd*) [ -r "$rbd/cluster_fsid" ] || return 1
        printf 'rbd.%s.%s.%s' "$(cat "$rbd/cluster_fsid")" "$(cat "$rbd/pool_id")" \
            "$(cat "$rbd/image_id")"
        return ;;
    esac
    [ -s "$sys/dm/uuid" ] || return 1
    local below= one=
    for slave in "$sys"/slaves/*; do
        [ -e "$slave" ] || return 1
        one=$(identity "/sys/class/block/${slave##*/}") || return 1
        below="$below+$one"
    done
    printf '%s%s%s' "$(cat "$sys/dm/uuid")" "$below" "$part"
}
for device in "$@"; do
    real=$(readlink -f -- "$device")
    if [ -b "$real" ]; then identity "/sys/class/block/${real##*/}"; fi
    printf '\n'
done
"""


async def device_identities(remote: Remote, devices: Sequence[str]) -> dict[str, str | None]:
    """Return a name for each block device that is the same on every host that sees the device.

    The name is made of the World Wide Name (WWN) or NVMe identifier, or of the identifiers of
    device mapper and of the devices below. None: the path is no block device, or has no such name.
    Raises RemoteError or HostKeyRefused.
    """
    if not devices:
        return {}
    answer = await remote.run(["sh", "-s", "--", *devices], text=_IDENTITY)
    lines = answer.out.split("\n")
    if len(lines) != len(devices) + 1:
        raise RemoteError(
            f"{remote.host.name}: looking at block devices: invalid answer: {answer.out[:80]!r}",
            host=remote.host.name,
            hint="make sure that logins on the host print nothing",
        )
    return {device: line or None for device, line in zip(devices, lines, strict=False)}
