"""Ways for the stream to travel, on real hosts: each is run with whole ledgers, or seen refused."""

import re
from typing import Any

import pytest

from tests.lab.bench import WHOLE, Bench, until
from tests.lab.moving import Moved, move, other, pki, verdict
from vmckpt.migration.plan.tls_checks import TlsVerdict
from vmckpt.model.migration import AutoConverge, Compression
from vmckpt.units import MIB, parse_rate
from vmckpt_lab.certificates import Authority, install
from vmckpt_lab.guests import FILLING
from vmckpt_lab.packet_capture import Capture

SLOWLY = AutoConverge(initial=30, increment=20, at_most=80)
TLS: dict[str, Any] = {"tls_name": "HOST"}
XBZRLE: dict[str, Any] = {"compression": Compression.XBZRLE}
MT: dict[str, Any] = {"compression": Compression.MT, "compression_level": 1}
STOPPED: dict[str, Any] = {"live": False}
TWO: dict[str, Any] = {"connections": 2}

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stopped": STOPPED,
    "two connections": TWO,
    "four connections": {"connections": 4},
    "two connections, stopped": TWO | STOPPED,
    "two connections, post-copy allowed": TWO | {"post_copy": True},
    "xbzrle": XBZRLE | {"xbzrle_cache": 32 * MIB},
    "xbzrle, stopped": XBZRLE | STOPPED,
    # Accepted, and then nothing is compressed.
    "xbzrle, two connections": XBZRLE | TWO,
    "mt": MT,
    "mt, stopped": MT | STOPPED,
    "auto-converge": {"auto_converge": SLOWLY},
    "auto-converge, stopped": {"auto_converge": SLOWLY} | STOPPED,
    "tls": TLS,
    "tls, stopped": TLS | STOPPED,
    "tls, two connections": TLS | TWO,
    "tls, xbzrle": TLS | XBZRLE,
    "tls, mt": TLS | MT,
}
SWITCHES: dict[str, dict[str, Any]] = {
    "post-copy": {"postcopy_bandwidth": parse_rate("50MiB/s")},
    "tls": TLS,
    "auto-converge": {"auto_converge": SLOWLY},
    "xbzrle": XBZRLE,
    "mt": MT,
}
ZERO: dict[str, Any] = {"zero_copy": True}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero-copy alone": (ZERO, "only available for parallel migration"),
    "zero-copy, tls": (ZERO | TLS, "only available for parallel migration"),
    "zero-copy, tls, two connections": (ZERO | TLS | TWO, "non-TLS"),
    # QEMU's words, and those of a libvirt that knows it itself.
    "mt, two connections": (MT | TWO, "not compatible with compress|with parallel migration"),
    "post-copy, stopped": ({"post_copy": True} | STOPPED, "not supported with non-live"),
    "a cache of no power of two": (XBZRLE | {"xbzrle_cache": 3 * MIB}, "power of two"),
}

NOT_YET = "Postcopy is not yet compatible with multifd"
NO_MT = "'compress' is not supported by QEMU binary"
GONE: dict[str, str] = {
    "two connections, post-copy allowed": NOT_YET,
    "xbzrle, two connections": "isn't supported with parallel migration",
    "mt": NO_MT,
    "mt, stopped": NO_MT,
    "tls, mt": NO_MT,
}
"""What QEMU 10.0 and libvirt 11 refuse."""


def named(wishes: dict[str, Any], to: str) -> dict[str, Any]:
    return {key: to if value == "HOST" else value for key, value in wishes.items()}


def qemu(bench: Bench) -> tuple[int, ...]:
    """The first two numbers of its version."""
    told = bench.inside("alpha", "qemu-system-x86_64", "--version").split()[3]
    return tuple(int(part) for part in told.split(".")[:2])


@pytest.mark.long
def test_each_way_to_travel_leaves_the_ledgers_whole(bench: Bench) -> None:
    bench.guest(memory="192MiB", dirty="32MiB@10MiB/s", disk="16MiB")
    for what, wishes in RUNS.items():
        at = bench.where()[0]
        to = other(at)
        moved = move(bench, to, **named(wishes, to))
        if what in GONE and qemu(bench) >= (10, 0):
            assert GONE[what] in moved.explained, what
            assert (what, bench.where()) == (what, [at])
            continue
        assert (what, moved.explained) == (what, "")
        assert (what, bench.where()) == (what, [to])
        assert (what, bench.ledgers()) == (what, WHOLE)


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[pytest.mark.long] * (what != "tls")) for what in SWITCHES],
)
def test_post_copy_goes_with(bench: Bench, what: str) -> None:
    bench.guest(memory="192MiB", dirty="64MiB@30MiB/s", disk="16MiB")
    moved = move(
        bench, switch_in_pass=2, post_copy=True, bandwidth=parse_rate("40MiB/s"),
        **named(SWITCHES[what], "beta"),
    )  # fmt: skip

    if what == "mt" and qemu(bench) >= (10, 0):
        assert NO_MT in moved.explained
        assert bench.where() == ["alpha"]
        return
    assert moved.explained == ""
    assert bench.where() == ["beta"]
    assert bench.ledgers() == WHOLE


def test_what_does_not_go_together_is_refused_and_the_guest_stays(bench: Bench) -> None:
    bench.guest(memory="192MiB", dirty="32MiB@10MiB/s", disk="16MiB")
    for what, (wishes, words) in REFUSED.items():
        moved = move(bench, **named(wishes, "beta"))
        assert moved.error is not None, what
        assert re.search(words, moved.error.message), (what, moved.error.message)
        assert (what, bench.where()) == (what, ["alpha"])
    assert bench.ledgers() == WHOLE


@pytest.mark.parametrize("method", [Compression.ZLIB, Compression.ZSTD])
def test_compression_of_many_streams_runs_or_is_refused_by_version(
    bench: Bench, method: Compression
) -> None:
    bench.guest(memory="192MiB", dirty="32MiB@10MiB/s", disk="16MiB")
    moved = move(bench, compression=method, connections=2)

    if moved.good:
        assert bench.where() == ["beta"]
    else:
        assert "9.4" in moved.explained or "Unsupported compression method" in moved.explained
        assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


def test_zero_copy_runs_or_says_that_it_may_not_lock_memory(bench: Bench) -> None:
    bench.guest(memory="192MiB", dirty="32MiB@10MiB/s", disk="16MiB")
    moved = move(bench, zero_copy=True, connections=2)

    if moved.good:
        assert bench.where() == ["beta"]
    else:
        assert "zero-copy: libvirtd cannot raise QEMU's limit for locked memory" in moved.explained
        assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_the_trap_post_copy_over_two_connections_ends_the_guest(bench: Bench) -> None:
    """QEMU 7.2 does not refuse it, libvirt calls it a success, and the guest is gone."""
    bench.guest(memory="192MiB", dirty="64MiB@30MiB/s", disk="16MiB")
    moved = move(
        bench, switch_in_pass=2, post_copy=True, connections=2, bandwidth=parse_rate("40MiB/s")
    )
    if moved.good and qemu(bench) < (10, 1):
        until(lambda: bench.where() == [])
        return
    if not moved.good:
        assert NOT_YET in moved.explained
        assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


def test_a_wrong_name_is_refused_and_named(bench: Bench) -> None:
    bench.guest(memory="192MiB", dirty="32MiB@10MiB/s", disk="16MiB")
    for connections in (1, 2):
        moved = move(bench, tls_name="gamma", connections=connections)
        assert moved.error is not None
        assert "beta: " in moved.explained
        assert "'gamma'" in moved.explained
        assert "run vmckpt doctor alpha beta" in moved.explained
    assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


def tried(bench: Bench) -> tuple[list[tuple[str, str]], Moved]:
    """What is found before the start, and what comes of a start all the same."""
    found = [(finding.code, finding.where) for finding in verdict(bench).findings]
    return found, move(bench, tls_name="beta")


def test_a_missing_file_is_found_before_the_start(bench: Bench) -> None:
    bench.guest(memory="128MiB", dirty="16MiB@1MiB/s", disk="16MiB")
    for host, role in (("alpha", "client"), ("beta", "server")):
        for name in ("ca-cert.pem", f"{role}-cert.pem", f"{role}-key.pem"):
            path = pki(bench, host) / name
            away = path.with_suffix(".away")
            path.rename(away)
            try:
                found, moved = tried(bench)
            finally:
                away.rename(path)
            assert (name, found) == (name, [("tls-missing", host)])
            assert moved.error is not None, name
            assert "run vmckpt doctor alpha beta" in moved.explained, name
    assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


def test_a_certificate_of_another_authority_is_found_before_the_start(bench: Bench) -> None:
    bench.guest(memory="128MiB", dirty="16MiB@1MiB/s", disk="16MiB")
    etc = bench.plan.host("beta").root / "etc"
    old = {path: path.read_bytes() for path in (etc / "pki").rglob("*.pem")}
    install(Authority("elsewhere"), etc, "beta", [])
    try:
        found, moved = tried(bench)
    finally:
        for path, content in old.items():
            path.write_bytes(content)

    assert found == [("tls-authority", "beta"), ("tls-authority", "alpha")]
    assert moved.error is not None
    assert "rejects the other's QEMU certificate" in moved.explained
    assert bench.where() == ["alpha"]
    assert verdict(bench) == TlsVerdict(name="beta", findings=())
    assert move(bench, tls_name="beta").good


@pytest.mark.parametrize("secret", [False, True], ids=["plain", "tls"])
def test_nothing_readable_goes_over_the_wire(bench: Bench, secret: bool) -> None:
    """The guest's memory holds its kernel arguments, many times; its disk a byte, many times."""
    guest = bench.guest(
        memory="192MiB", dirty="32MiB@1MiB/s", disk="32MiB", private_disk=True, written="8MiB"
    )
    bench.inside("beta", "qemu-img", "create", "-q", "-f", "raw", guest.disk_path, "32M")
    with (
        Capture(bench.plan, "beta", b"VMC_MEMORY_MIB=") as memory,
        Capture(bench.plan, "beta", FILLING * 64) as disk,
    ):
        moved = move(
            bench, copied_disks=("vda",), storage_proven=False, bandwidth=parse_rate("60MiB/s"),
            tls_name="beta" if secret else None,
        )  # fmt: skip

    assert moved.explained == ""
    for seen, in_plain in ((memory.heard, 3), (disk.heard, 100)):
        assert seen.bytes > 40 * MIB
        assert seen.lost == 0
        assert seen.hits == 0 if secret else seen.hits >= in_plain
    assert bench.ledgers() == WHOLE
