from dataclasses import replace

import pytest

from tests.support.policies import LEAST, policy
from vmckpt.model import known_problems
from vmckpt.model.migration import Compression, Mode
from vmckpt.policy import compatibility
from vmckpt.policy.compatibility import Conflict, Versions
from vmckpt.policy.model import Policy, Tls, Transport

DEBIAN12 = Versions(qemu="7.2.22", libvirt="9.0.0")
DEBIAN13 = Versions(qemu="10.0.2", libvirt="11.3.0")
NEWEST = Versions(qemu="10.1.0", libvirt="11.6.0")
OLD = Versions(qemu="6.2.0", libvirt="8.0.0")

PRECOPY = replace(policy(LEAST), mode=Mode.PRECOPY)
HYBRID = policy(LEAST + "mode: hybrid\nconverge: {rules: [{do: start_postcopy}]}\n")
POSTCOPY = replace(policy(LEAST), mode=Mode.POSTCOPY)
COMPRESSES = policy(LEAST + "converge: {rules: [{do: pause}, {do: {compress: {}}}]}\n")
STOPPED = replace(policy(LEAST), mode=Mode.STOP_AND_COPY)


def over(
    base: Policy, *, connections: int = 1, zero_copy: bool = False,
    compression: Compression = Compression.NONE, tls: Tls = Tls.OFF,
) -> Policy:  # fmt: skip
    how = Transport(
        connections=connections, zero_copy=zero_copy, compression=compression, tls=tls
    )  # fmt: skip
    return replace(base, transport=how)


def found(
    base: Policy, source: Versions = NEWEST, target: Versions = NEWEST, *, fact: str | None = None
) -> dict[str, Conflict]:
    """The conflicts by code; `fact`: what is true of the guest."""
    facts = {fact: True} if fact else {}
    conflicts = compatibility.conflicts(base, source=source, target=target, **facts)
    return {one.code: one for one in conflicts}


MT, XBZRLE, ZLIB, ZSTD = Compression.MT, Compression.XBZRLE, Compression.ZLIB, Compression.ZSTD


@pytest.mark.parametrize(
    ("base", "code", "key"),
    [
        (over(PRECOPY, zero_copy=True), "zero-copy-needs-connections", "zero_copy"),
        (over(PRECOPY, tls=Tls.REQUIRED, connections=2, zero_copy=True), "zero-copy-with-tls",
         "zero_copy"),
        (over(PRECOPY, tls=Tls.PREFERRED, connections=2, zero_copy=True), "zero-copy-with-tls",
         "zero_copy"),
        (over(PRECOPY, compression=ZSTD, connections=2, zero_copy=True),
         "zero-copy-with-compression", "zero_copy"),
        (over(PRECOPY, compression=ZLIB), "compression-needs-connections", "compression"),
        (over(PRECOPY, compression=ZSTD), "compression-needs-connections", "compression"),
        (over(PRECOPY, compression=XBZRLE, connections=2), "compression-with-connections",
         "compression"),
        (over(COMPRESSES, connections=2), "compress-with-connections", "do"),
    ],
)  # fmt: skip
def test_what_no_version_can_do_is_a_conflict(base: Policy, code: str, key: str) -> None:
    conflicts = found(base)

    assert list(conflicts) == [code]
    assert conflicts[code].keys[-1] == key
    assert not conflicts[code].optional
    assert conflicts[code].hint
    assert [one.code for one in compatibility.impossible(base)] == [code]


def test_mt_compression_excludes_parallel_connections_and_postcopy() -> None:
    both = over(HYBRID, compression=MT, connections=2)

    assert {one.code for one in compatibility.impossible(both)} == {
        "compression-with-connections",
        "mt-with-post-copy",
    }


def test_zero_copy_excludes_a_rule_that_compresses_later() -> None:
    codes = found(over(COMPRESSES, zero_copy=True, connections=2))

    assert set(codes) == {"zero-copy-with-compression", "compress-with-connections"}


@pytest.mark.parametrize(
    ("base", "code", "lacking", "having"),
    [
        (over(HYBRID, connections=4), "connections-with-post-copy", DEBIAN13, NEWEST),
        (over(POSTCOPY, connections=4), "connections-with-post-copy", DEBIAN13, NEWEST),
        (over(PRECOPY, compression=MT), "mt-is-gone", DEBIAN13, DEBIAN12),
        (over(PRECOPY, compression=ZSTD, connections=2), "compression-needs-newer-libvirt",
         DEBIAN12, DEBIAN13),
        (over(PRECOPY, compression=ZLIB, connections=2), "compression-needs-newer-libvirt",
         DEBIAN12, DEBIAN13),
        (over(PRECOPY, zero_copy=True, connections=2), "zero-copy-needs-newer", OLD, DEBIAN12),
        (HYBRID, "recovery-needs-newer-libvirt", OLD, DEBIAN12),
    ],
)  # fmt: skip
def test_what_one_host_cannot_do_is_a_conflict_whichever_of_the_two_it_is(
    base: Policy, code: str, lacking: Versions, having: Versions
) -> None:
    assert code in found(base, source=lacking, target=having)
    assert code in found(base, source=having, target=lacking)
    assert code not in found(base, source=having, target=having)


@pytest.mark.parametrize(
    ("fact", "code"),
    [
        ("host_devices", "post-copy-with-host-devices"),
        ("file_backed_memory", "post-copy-with-file-backed-memory"),
    ],
)
def test_a_guest_that_cannot_do_postcopy_is_moved_without_it_unless_the_mode_is_postcopy(
    fact: str, code: str
) -> None:
    assert found(HYBRID, fact=fact)[code].optional
    assert not found(POSTCOPY, fact=fact)[code].optional
    assert found(PRECOPY, fact=fact) == {}


def test_connections_exclude_postcopy_only_where_it_is_not_all_the_policy_has() -> None:
    def optional(base: Policy) -> list[bool]:
        return [one.optional for one in found(over(base, connections=2), DEBIAN12).values()]

    assert optional(HYBRID) == [True]
    assert optional(POSTCOPY) == [False]
    assert optional(PRECOPY) == []


def test_huge_pages_and_disks_copied_while_the_guest_stands_still_are_only_said() -> None:
    assert found(HYBRID, fact="huge_pages")["post-copy-with-huge-pages"].optional
    assert found(STOPPED, fact="copied_disks")["stopped-while-disks-are-copied"].optional
    assert found(HYBRID, fact="copied_disks") == {}
    assert found(PRECOPY, fact="huge_pages") == {}


@pytest.mark.parametrize(
    "base",
    [
        HYBRID,
        COMPRESSES,
        over(PRECOPY, connections=255),
        over(PRECOPY, connections=2, zero_copy=True),
        over(HYBRID, compression=XBZRLE, tls=Tls.REQUIRED),
        over(PRECOPY, connections=2, tls=Tls.REQUIRED),
    ],
)
def test_what_goes_together_is_no_conflict(base: Policy) -> None:
    assert found(base, source=DEBIAN12, target=DEBIAN13) == {}


@pytest.mark.parametrize(
    ("older", "newer"),
    [("7.2.22", "10.0.2"), ("9.0.0", "9.4.0"), ("10.1", "10.1.0"), ("", "1"), ("8.2+ds", "10~rc1")],
)  # fmt: skip
def test_versions_are_compared_as_numbers(older: str, newer: str) -> None:
    assert known_problems.version(older) < known_problems.version(newer)
