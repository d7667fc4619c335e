"""A move order in libvirt's flags and parameters, and libvirt's refusals in our words."""

import math
import re

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.model.host import Host
from vmckpt.model.migration import Compression, Driver, MoveOrder
from vmckpt.units import MIB, BytesPerSecond

Parameters = dict[str, int | str | list[str]]

_LEVELS = {
    Compression.ZLIB: "VIR_MIGRATE_PARAM_COMPRESSION_ZLIB_LEVEL",
    Compression.ZSTD: "VIR_MIGRATE_PARAM_COMPRESSION_ZSTD_LEVEL",
}


def flags(order: MoveOrder) -> int:
    """The flags of migrateToURI3 and migrate3."""
    chosen = {
        libvirt.VIR_MIGRATE_ABORT_ON_ERROR: True,
        libvirt.VIR_MIGRATE_LIVE: order.live,
        libvirt.VIR_MIGRATE_PEER2PEER: order.driver is Driver.PEER_TO_PEER,
        libvirt.VIR_MIGRATE_PERSIST_DEST: order.persistent,
        libvirt.VIR_MIGRATE_UNDEFINE_SOURCE: order.persistent,
        # Copied disks pass libvirt's safety check by themselves, so this speaks for the others.
        libvirt.VIR_MIGRATE_UNSAFE: order.storage_proven,
        # QEMU is told at the start of a resumed migration what it was told the first time.
        libvirt.VIR_MIGRATE_POSTCOPY: order.post_copy or order.resume,
        libvirt.VIR_MIGRATE_POSTCOPY_RESUME: order.resume,
        libvirt.VIR_MIGRATE_AUTO_CONVERGE: order.auto_converge is not None,
        libvirt.VIR_MIGRATE_TLS: order.tls_name is not None,
        libvirt.VIR_MIGRATE_PARALLEL: order.connections > 1,
        libvirt.VIR_MIGRATE_ZEROCOPY: order.zero_copy,
        libvirt.VIR_MIGRATE_COMPRESSED: order.compression is not Compression.NONE,
        libvirt.VIR_MIGRATE_NON_SHARED_DISK: bool(order.copied_disks),
    }
    total = 0
    for flag, wanted in chosen.items():
        total |= flag if wanted else 0
    return total


def params(order: MoveOrder, target: Host) -> Parameters:
    """Their typed parameters. Raises HypervisorError for what the libvirt here does not know."""
    found: dict[str, int | str | list[str] | None] = {
        libvirt.VIR_MIGRATE_PARAM_DEST_XML: order.target_xml,
        libvirt.VIR_MIGRATE_PARAM_PERSIST_XML: order.target_definition,
        libvirt.VIR_MIGRATE_PARAM_BANDWIDTH: _mib(order.bandwidth),
        libvirt.VIR_MIGRATE_PARAM_BANDWIDTH_POSTCOPY: _mib(order.postcopy_bandwidth),
        libvirt.VIR_MIGRATE_PARAM_TLS_DESTINATION: order.tls_name,
    }
    if (address := target.migration_address) is not None:
        uri = f"tcp://{f'[{address}]' if ':' in address else address}"
        found[libvirt.VIR_MIGRATE_PARAM_URI] = uri
        found[libvirt.VIR_MIGRATE_PARAM_DISKS_URI] = uri if order.copied_disks else None
    if order.copied_disks:
        found[libvirt.VIR_MIGRATE_PARAM_MIGRATE_DISKS] = list(order.copied_disks)
    if (slowing := order.auto_converge) is not None:
        found[libvirt.VIR_MIGRATE_PARAM_AUTO_CONVERGE_INITIAL] = slowing.initial
        found[libvirt.VIR_MIGRATE_PARAM_AUTO_CONVERGE_INCREMENT] = slowing.increment
    if order.connections > 1:
        found[libvirt.VIR_MIGRATE_PARAM_PARALLEL_CONNECTIONS] = order.connections
    given: Parameters = {key: value for key, value in found.items() if value is not None}
    return given | _compression(order, target)


def _mib(rate: BytesPerSecond | None) -> int | None:
    """libvirt counts in MiB/s, and takes 0 for "no limit"."""
    return None if rate is None else max(1, math.ceil(rate / MIB))


def _compression(order: MoveOrder, target: Host) -> Parameters:
    method, level = order.compression, order.compression_level
    if method is Compression.NONE:
        return {}
    found: Parameters = {libvirt.VIR_MIGRATE_PARAM_COMPRESSION: [str(method)]}
    if method is Compression.XBZRLE and order.xbzrle_cache is not None:
        found[libvirt.VIR_MIGRATE_PARAM_COMPRESSION_XBZRLE_CACHE] = order.xbzrle_cache
    if method is Compression.MT and level is not None:
        found[libvirt.VIR_MIGRATE_PARAM_COMPRESSION_MT_LEVEL] = level
    if method in _LEVELS:
        key = getattr(libvirt, _LEVELS[method], None)
        if not isinstance(key, str):
            raise HypervisorError(
                f"compression {method}: the libvirt-python here is older than 9.4",
                host=target.name,
                mend="upgrade it, or choose compression xbzrle or none",
            )
        if level is not None:
            found[key] = level
    return found


def explained(error: HypervisorError, order: MoveOrder, target: Host) -> HypervisorError:
    """The error with its cause and mend, where libvirt's words leave them to be guessed.

    The kind of error stays: only what libvirt refused (HypervisorError itself) is looked at.
    """
    if type(error) is not HypervisorError:
        return error
    said, doctor = error.message, f"run vmckpt doctor {error.host} {target.name}"
    if name := re.search(r"Certificate does not match the hostname (\S*)", said):
        text = f"{target.name}: its QEMU certificate does not carry the name {name[1]!r}"
        return _renamed(error, text, doctor)
    if missing := re.search(r"Unable to access credentials (\S+): ([^:]+)$", said):
        text = f"{error.host} or {target.name}: QEMU cannot read {missing[1]} ({missing[2]})"
        return _renamed(error, text, doctor)
    # The target only sees a stream that is none; what the source disliked is in its QEMU's log.
    if order.tls_name is not None and re.search("(?<!non-)TLS|certificate", said):
        why = f": {said.rsplit(': ', 1)[1]}" if "certificate" in said and ": " in said else ""
        text = (
            f"{target.name}: no encrypted stream between it and {error.host}: one does not accept"
            f" the other's QEMU certificate (the name asked for was {order.tls_name!r}){why}"
        )
        return _renamed(error, text, doctor)
    if order.tls_name is not None and "Unable to write to socket: " in said:
        # A target that refuses the source's certificate may hang up before anybody says why.
        return _renamed(error, said, f"{doctor}: one may not accept the other's certificate")
    if order.zero_copy and "locked memory" in said:
        text = f"{error.host}: zero-copy: libvirtd may not let QEMU lock the guest's memory"
        return _renamed(error, text, "let libvirtd have CAP_SYS_RESOURCE, or go without zero-copy")
    return error


def _renamed(error: HypervisorError, text: str, mend: str) -> HypervisorError:
    return HypervisorError(text, host=error.host, code=error.code, mend=mend)
