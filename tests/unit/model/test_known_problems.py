"""Faults of versions: each with its condition, and nothing without it."""

from dataclasses import replace

import pytest

from tests.support.builders import GUEST, host_facts
from vmckpt.model import known_problems
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Guest
from vmckpt.model.host import HostFacts
from vmckpt.units import GIB, Bytes

OLD = replace(host_facts("a"), qemu_version="8.2.2", libvirt_version="11.2.0")
NEW = replace(host_facts("b"), qemu_version="10.1.0", libvirt_version="11.4.0")
TCG = replace(GUEST, accelerator="qemu")
LARGE = replace(GUEST, memory=Bytes(64 * GIB))


def found(
    guest: Guest = GUEST, source: HostFacts = OLD, target: HostFacts = OLD, *,
    encrypted: bool = False, post_copy: bool = False, travels: int = 0,
) -> list[Finding]:  # fmt: skip
    return list(known_problems.of_move(
        guest, source, target, encrypted=encrypted, post_copy=post_copy, travels=Bytes(travels),
    ))  # fmt: skip


def codes(one: list[Finding]) -> list[str]:
    assert all(finding.severity is Severity.WARNING and finding.hint for finding in one)
    return [finding.code for finding in one]


def test_a_tcg_guest_that_flushes_its_tlb_or_a_newer_qemu_loses_no_writes() -> None:
    assert codes(found(TCG)) == ["tcg-lost-writes"]
    assert found(replace(TCG, kernel_arguments="quiet pti=on")) == []
    assert found(TCG, NEW) == []
    assert found(GUEST) == []


def test_keys_are_renewed_only_in_a_long_encrypted_move() -> None:
    assert codes(found(LARGE, encrypted=True)) == ["tls-key-renewal"]
    assert found(LARGE) == []
    assert found(encrypted=True) == []
    assert codes(found(encrypted=True, travels=80 * GIB)) == ["tls-key-renewal"]
    assert found(LARGE, NEW, NEW, encrypted=True) == []
    (only,) = found(LARGE, NEW, OLD, encrypted=True)
    assert "QEMU 8.2.2" in only.text
    assert "gitlab.com/qemu-project/qemu/-/issues/1937" in only.text


def test_pre_copy_sends_memory_again_and_post_copy_once() -> None:
    some = replace(GUEST, memory=Bytes(16 * GIB))
    safe = replace(OLD, libvirt_version="11.1.0")
    assert codes(found(some, safe, safe, encrypted=True)) == ["tls-key-renewal"]
    assert found(some, safe, safe, encrypted=True, post_copy=True) == []


@pytest.mark.parametrize(
    ("version", "affected"),
    [("11.1.0", False), ("11.2.0", True), ("11.3.0", True), ("11.4.0", False), ("", False)],
)
def test_a_broken_post_copy_is_not_resumed_by_two_versions(version: str, affected: bool) -> None:
    there = replace(NEW, libvirt_version=version)
    assert codes(found(GUEST, NEW, there, post_copy=True)) == (
        ["post-copy-resume-crash"] if affected else []
    )
    assert found(GUEST, NEW, there) == []


def test_doctor_names_the_problems_of_a_hosts_versions() -> None:
    kvm = replace(OLD, accelerators=frozenset({"kvm", "qemu"}))
    plain = replace(OLD, accelerators=frozenset({"qemu"}))
    assert [one.code for one in known_problems.of_host("a", kvm)] == [
        "tls-key-renewal", "post-copy-resume-crash",
    ]  # fmt: skip
    assert "tcg-lost-writes" in [one.code for one in known_problems.of_host("a", plain)]
    assert list(known_problems.of_host("b", NEW)) == []


@pytest.mark.parametrize("problem", known_problems.PROBLEMS, ids=lambda one: one.code)
def test_each_problem_has_a_source_and_a_date(problem: known_problems.Problem) -> None:
    assert problem.source.startswith(("https://", "docs/adr/"))
    assert problem.read.year >= 2026
    assert problem.since < problem.fixed


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("7.2.22+dfsg", (7, 2, 22)), ("10.0.2", (10, 0, 2)), ("what", ()), ("", ()), ("v8", ()),
        ("9", (9,)), ("10.0.0 (Debian 1:10)", (10, 0, 0)), ("8.2 (Debian 1:10)", (8, 2)),
        ("7..2", (7,)), ("9" * 9999, (999999999,)),
    ],
)  # fmt: skip
def test_a_version_is_read(text: str, numbers: tuple[int, ...]) -> None:
    assert known_problems.version(text) == numbers
