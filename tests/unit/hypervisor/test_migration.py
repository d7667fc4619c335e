"""A move order in libvirt's words."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import libvirt
import libvirt_qemu
import pytest

from vmckpt.errors import HostUnreachable, HypervisorError, MigrationRefused
from vmckpt.hypervisor import migration
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.host import Host
from vmckpt.model.migration import AutoConverge, Compression, Driver, MoveOrder
from vmckpt.units import MIB, BytesPerSecond

BETA = Host(name="beta", uri="qemu:///system", migration_address="10.1.0.12")
ALWAYS = libvirt.VIR_MIGRATE_ABORT_ON_ERROR
LIVE = ALWAYS | libvirt.VIR_MIGRATE_LIVE
URI = {"migrate_uri": "tcp://10.1.0.12"}


def order(**wishes: Any) -> MoveOrder:
    usual: dict[str, Any] = {
        "driver": Driver.CLIENT, "persistent": False, "autostart": False,
        "storage_proven": False, "bandwidth": None,
    }  # fmt: skip
    return MoveOrder(**(usual | wishes))


@pytest.mark.parametrize(
    ("wishes", "flags"),
    [
        ({}, LIVE),
        ({"live": False}, ALWAYS),
        ({"driver": Driver.PEER_TO_PEER}, LIVE | libvirt.VIR_MIGRATE_PEER2PEER),
        (
            {"persistent": True},
            LIVE | libvirt.VIR_MIGRATE_PERSIST_DEST | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE,
        ),
        ({"autostart": True}, LIVE),
        ({"storage_proven": True}, LIVE | libvirt.VIR_MIGRATE_UNSAFE),
        ({"copied_disks": ("vda",)}, LIVE | libvirt.VIR_MIGRATE_NON_SHARED_DISK),
        ({"copied_disks": ("vda",), "shallow": True}, LIVE | libvirt.VIR_MIGRATE_NON_SHARED_INC),
        ({"shallow": True}, LIVE),
        (
            {"copied_disks": ("vda",), "storage_proven": True},
            LIVE | libvirt.VIR_MIGRATE_NON_SHARED_DISK | libvirt.VIR_MIGRATE_UNSAFE,
        ),
        ({"post_copy": True}, LIVE | libvirt.VIR_MIGRATE_POSTCOPY),
        (
            {"resume": True},
            LIVE | libvirt.VIR_MIGRATE_POSTCOPY | libvirt.VIR_MIGRATE_POSTCOPY_RESUME,
        ),
        (
            {"auto_converge": AutoConverge(initial=1, increment=1, at_most=2)},
            LIVE | libvirt.VIR_MIGRATE_AUTO_CONVERGE,
        ),
        ({"tls_name": "beta"}, LIVE | libvirt.VIR_MIGRATE_TLS),
        ({"connections": 4}, LIVE | libvirt.VIR_MIGRATE_PARALLEL),
        ({"zero_copy": True}, LIVE | libvirt.VIR_MIGRATE_ZEROCOPY),
        ({"compression": Compression.MT}, LIVE | libvirt.VIR_MIGRATE_COMPRESSED),
    ],
)
def test_flags(wishes: dict[str, Any], flags: int) -> None:
    assert migration.migration_flags(order(**wishes)) == flags


@pytest.mark.parametrize(
    ("wishes", "params"),
    [
        ({}, {}),
        ({"bandwidth": BytesPerSecond(1)}, {"bandwidth": 1}),
        ({"bandwidth": BytesPerSecond(3 * MIB // 2)}, {"bandwidth": 2}),
        ({"postcopy_bandwidth": BytesPerSecond(9 * MIB)}, {"bandwidth.postcopy": 9}),
        (
            {"auto_converge": AutoConverge(initial=30, increment=15, at_most=80)},
            {"auto_converge.initial": 30, "auto_converge.increment": 15},
        ),
        ({"tls_name": "beta.example"}, {"tls.destination": "beta.example"}),
        ({"connections": 4}, {"parallel.connections": 4}),
        ({"compression": Compression.XBZRLE}, {"compression": ["xbzrle"]}),
        (
            {"compression": Compression.XBZRLE, "xbzrle_cache": 32 * MIB},
            {"compression": ["xbzrle"], "compression.xbzrle.cache": 32 * MIB},
        ),
        (
            {"compression": Compression.MT, "compression_level": 1},
            {"compression": ["mt"], "compression.mt.level": 1},
        ),
        (
            {"copied_disks": ("vda", "vdb")},
            {"migrate_disks": ["vda", "vdb"], "disks_uri": "tcp://10.1.0.12"},
        ),
        (
            {"target_xml": "<a/>", "target_definition": "<b/>"},
            {"destination_xml": "<a/>", "persistent_xml": "<b/>"},
        ),
    ],
)
def test_parameters(wishes: dict[str, Any], params: dict[str, Any]) -> None:
    assert migration.migration_params(order(**wishes), BETA) == URI | params


@pytest.mark.parametrize(
    ("address", "params"),
    [
        (None, {"migrate_disks": ["vda"]}),
        (
            "2001:db8::2",
            {
                "migrate_disks": ["vda"], "migrate_uri": "tcp://[2001:db8::2]",
                "disks_uri": "tcp://[2001:db8::2]",
            },
        ),
    ],
)  # fmt: skip
def test_disks_go_over_the_migration_network(address: str | None, params: dict[str, Any]) -> None:
    host = Host(name="beta", uri="qemu:///system", migration_address=address)

    assert migration.migration_params(order(copied_disks=("vda",)), host) == params


@pytest.mark.parametrize("method", [Compression.ZLIB, Compression.ZSTD])
def test_a_compression_that_libvirt_here_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, method: Compression
) -> None:
    name = f"VIR_MIGRATE_PARAM_COMPRESSION_{method.upper()}_LEVEL"
    monkeypatch.delattr(libvirt, name, raising=False)
    with pytest.raises(HypervisorError, match=f"compression {method} needs libvirt-python 9.4"):
        migration.migration_params(order(compression=method, connections=2), BETA)

    monkeypatch.setattr(libvirt, name, f"compression.{method}.level", raising=False)
    found = migration.migration_params(order(compression=method, compression_level=3), BETA)
    assert found == URI | {"compression": [str(method)], f"compression.{method}.level": 3}


@pytest.mark.parametrize(
    ("said", "wishes", "shown"),
    [
        (
            "job 'migration out' failed: Certificate does not match the hostname gamma",
            {"tls_name": "gamma"},
            "beta: the QEMU certificate is not valid for the name 'gamma'; run vmckpt doctor",
        ),
        (
            "unable to execute QEMU command 'object-add': Unable to access credentials"
            " /etc/pki/qemu/ca-cert.pem: No such file or directory",
            {"tls_name": "beta"},
            "alpha or beta: QEMU cannot read /etc/pki/qemu/ca-cert.pem (No such file or directory)",
        ),
        (
            "qemu unexpectedly closed the monitor: Cannot read from TLS channel: Input/output"
            " error Not a migration stream",
            {"tls_name": "gamma"},
            "rejects the other's QEMU certificate (expected name 'gamma')",
        ),
        (
            "job failed: The certificate hasn't got a known issuer",
            {"tls_name": "beta"},
            "(expected name 'beta'): The certificate hasn't got a known issuer",
        ),
        (
            "cannot limit locked memory of process 92 to 268435456: Operation not permitted",
            {"zero_copy": True},
            "alpha: zero-copy: libvirtd cannot raise QEMU's limit for locked memory",
        ),
        (
            "job 'migration out' failed: Unable to write to socket: Broken pipe",
            {"tls_name": "beta"},
            "Broken pipe; run vmckpt doctor alpha beta: one host may reject the other's",
        ),
        ("something about TLS", {}, "something about TLS"),
    ],
)
def test_a_refusal_gets_its_cause(said: str, wishes: dict[str, Any], shown: str) -> None:
    error = HypervisorError(said, host="alpha", code=9)
    explained = migration.explained(error, order(**wishes), BETA)

    assert shown in str(explained)
    assert (explained.host, explained.code) == ("alpha", 9)


def test_what_libvirt_did_not_refuse_is_left_alone() -> None:
    error = HostUnreachable("alpha: no TLS connection", host="alpha")

    assert migration.explained(error, order(tls_name="beta"), BETA) is error


def test_what_qemu_says_of_a_combination_is_not_taken_for_a_certificate() -> None:
    said = "Zero copy only available for non-compressed non-TLS multifd migration"
    order = MoveOrder(
        driver=Driver.PEER_TO_PEER, persistent=True, autostart=False, storage_proven=True,
        bandwidth=None, tls_name="beta", zero_copy=True, connections=2,
    )  # fmt: skip
    refused = HypervisorError(said, host="alpha")

    assert (
        migration.explained(refused, order, Host(name="beta", uri="qemu+tcp://b/system")) is refused
    )


CODES = [
    (libvirt.VIR_ERR_OPERATION_INVALID, True), (libvirt.VIR_ERR_MIGRATE_UNSAFE, True),
    (libvirt.VIR_ERR_CONFIG_UNSUPPORTED, False), (libvirt.VIR_ERR_NO_SECRET, False),
    (libvirt.VIR_ERR_OPERATION_FAILED, None), (libvirt.VIR_ERR_INTERNAL_ERROR, None), (None, None),
]  # fmt: skip


@pytest.mark.parametrize(("code", "of_guest"), CODES)
def test_what_libvirt_refuses_is_told_by_its_code_from_what_may_succeed_later(
    code: int | None, of_guest: bool | None
) -> None:
    found = migration.explained(
        HypervisorError("alpha: no", host="alpha", code=code), order(), BETA
    )

    assert isinstance(found, MigrationRefused) is (of_guest is not None)
    if isinstance(found, MigrationRefused):
        assert (found.of_guest, found.message, found.code) == (of_guest, "alpha: no", code)


async def test_a_throttle_that_qemu_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def execute(_what: str, call: Callable[[Any], Any]) -> Any:
        return call(SimpleNamespace(lookupByUUIDString=lambda _: None))

    refused = {"error": {"class": "GenericError", "desc": "expects an integer in 1 to 99"}}
    monkeypatch.setattr(libvirt_qemu, "qemuMonitorCommand", lambda *_: json.dumps(refused))
    source = cast("Hypervisor", SimpleNamespace(host=BETA, execute=execute))
    driver = migration.LibvirtMigrationDriver(source, source, "u-1")
    with pytest.raises(HypervisorError, match="beta: setting the CPU throttle: expects an integer"):
        await driver.throttle(AutoConverge(initial=1, increment=1, at_most=2))
