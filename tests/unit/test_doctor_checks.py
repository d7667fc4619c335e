from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.unit.builders import HOST, PROBE, host_facts
from vmckpt.doctor import checks
from vmckpt.doctor.checks import Examined
from vmckpt.lab import pki
from vmckpt.model.findings import Severity
from vmckpt.units import Bytes, Seconds

NOW = datetime.now(UTC)
GOOD = Examined(
    host=HOST, facts=host_facts("a"), probe=PROBE, kvm_boots=True, logins={"beta": None},
    ports={"beta": True},
)  # fmt: skip


def probed(**changes: Any) -> Examined:
    return replace(GOOD, probe=replace(PROBE, **changes))


def facts(**changes: Any) -> Examined:
    return replace(GOOD, facts=replace(host_facts("a"), **changes))


def wrong(examined: Examined, now: datetime = NOW) -> dict[str, Severity]:
    found = checks.check(examined, now)
    assert all(f.mend for f in found if f.severity in (Severity.WARNING, Severity.BLOCKER))
    return {f.code: f.severity for f in found if f.severity in (Severity.WARNING, Severity.BLOCKER)}


def test_nothing_is_wrong_with_a_good_host() -> None:
    assert wrong(GOOD) == {}


@pytest.mark.parametrize(
    ("examined", "code", "severity"),
    [
        (Examined(host=HOST, facts_error="no answer", probe=PROBE), "libvirt", Severity.BLOCKER),
        (facts(libvirt_version="8.10.0"), "libvirt-version", Severity.BLOCKER),
        (facts(qemu_version="7.1.9"), "qemu-version", Severity.BLOCKER),
        (replace(GOOD, twins=("beta",)), "same-libvirt", Severity.BLOCKER),
        (replace(GOOD, kvm_boots=False), "accelerator", Severity.WARNING),
        (facts(memory_free=Bytes(100 << 20)), "memory", Severity.WARNING),
        (replace(GOOD, probe_error="no login; do this"), "ssh", Severity.BLOCKER),
        (replace(GOOD, host=replace(HOST, ssh=None)), "ssh", Severity.WARNING),
        (probed(clock_skew=Seconds(-3.0)), "clock-skew", Severity.WARNING),
        (probed(userfaultfd=False), "post-copy", Severity.WARNING),
        (probed(post_copy_by_root_only=True), "post-copy", Severity.WARNING),
        (probed(memory_backing_kind="ext2/ext3"), "shared-memory", Severity.WARNING),
        (probed(storage_free={}), "storage", Severity.WARNING),
        (probed(storage_free={"/srv": Bytes(1)}), "storage", Severity.WARNING),
        (probed(certificates={"/x.pem": "no"}), "certificate", Severity.WARNING),
        (replace(GOOD, logins={"beta": "refused"}), "peer-login", Severity.WARNING),
        (replace(GOOD, ports={"beta": False}), "migration-ports", Severity.BLOCKER),
    ],
)
def test_each_fault_is_found_and_has_a_mend(
    examined: Examined, code: str, severity: Severity
) -> None:
    assert wrong(examined) == {code: severity}


def test_a_skew_that_the_round_trip_explains_is_none() -> None:
    assert wrong(probed(clock_skew=Seconds(0.3), clock_uncertainty=Seconds(0.25))) == {}


@pytest.mark.parametrize(
    ("days", "severity"), [(10, None), (350, Severity.WARNING), (400, Severity.BLOCKER)]
)
def test_certificates_are_warned_of_before_they_end(days: int, severity: Severity | None) -> None:
    pem = pki.Authority("test").issue("alpha", ["10.0.0.1"])[1].decode()
    found = wrong(probed(certificates={"/x.pem": pem}), NOW + timedelta(days=days))

    assert found == ({} if severity is None else {"certificate": severity})
