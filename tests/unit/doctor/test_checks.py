from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.builders import HOST, PROBE, host_facts
from vmckpt.doctor import checks
from vmckpt.doctor.checks import DeviceSeen, Examined, FenceSeen
from vmckpt.model.fencing import Ran
from vmckpt.model.finding import Severity
from vmckpt.model.host import NoTrace
from vmckpt.model.same_host import SameUuid
from vmckpt.units import Bytes, Seconds
from vmckpt_lab import certificates

NOW = datetime.now(UTC)
GOOD = Examined(
    host=HOST, facts=host_facts("a"), probe=PROBE, kvm_boots=True, logins={"beta": None},
    ports={"beta": True},
)  # fmt: skip


def twin(*, one: bool | None) -> SameUuid:
    return SameUuid(first="alpha", second="beta", one=one, why="x")


def probed(**changes: Any) -> Examined:
    return replace(GOOD, probe=replace(PROBE, **changes))


def facts(**changes: Any) -> Examined:
    return replace(GOOD, facts=replace(host_facts("a"), **changes))


def fenced(*statuses: int | None, levels: int = 1, **changes: Any) -> Examined:
    """A host whose devices have ended so, all of one level or each of its own."""
    devices = tuple(
        DeviceSeen(
            name="fence_ipmilan" if len(statuses) == 1 else f"device {number}",
            agent="fence_ipmilan", level=number % levels, ran=Ran(status, Seconds(15.0)),
        )
        for number, status in enumerate(statuses)
    )  # fmt: skip
    return replace(GOOD, fence=replace(FenceSeen(devices=devices), **changes))


def unasked(error: str, hint: str | None = None) -> Examined:
    """Its agent could not be run."""
    seen = DeviceSeen(name="fence_ipmilan", agent="fence_ipmilan", level=0, error=error, hint=hint)
    return fenced(0, devices=(seen,))


def wrong(examined: Examined, now: datetime = NOW) -> dict[str, Severity]:
    found = checks.check_host(examined, now)
    assert all(f.hint for f in found if f.severity in (Severity.WARNING, Severity.BLOCKER))
    return {f.code: f.severity for f in found if f.severity in (Severity.WARNING, Severity.BLOCKER)}


@pytest.mark.parametrize(
    ("one", "hint"),
    [
        (True, "leave alpha or beta out of hosts.yaml"),
        (False, "on beta, set host_uuid in /etc/libvirt/libvirtd.conf"),
        (None, "if they are one host, leave one of the names out of hosts.yaml; if not, set"),
    ],
)
def test_one_host_and_two_hosts_with_one_uuid_get_their_own_hints(
    one: bool | None, hint: str
) -> None:
    found = checks.check_host(replace(GOOD, twins=(twin(one=one),)), NOW)
    (finding,) = [same for same in found if same.code in ("one-host", "same-libvirt")]
    assert finding.hint is not None
    assert finding.hint.startswith(hint)
    assert "virsh" not in finding.hint


@pytest.mark.parametrize(
    ("arch", "package"), [("x86_64", "qemu-system-x86"), ("aarch64", "qemu-system-arm")]
)
def test_the_package_of_qemu_is_that_of_the_hosts_own_architecture(arch: str, package: str) -> None:
    platforms = {(arch, "kvm"): frozenset[str](), ("riscv64", "qemu"): frozenset[str]()}
    found = checks.check_host(facts(qemu_version="7.1.9", platforms=platforms), NOW)
    (finding,) = [one for one in found if one.code == "qemu-version"]
    assert finding.hint == f"run apt-get install {package} (from backports)"


def test_only_the_port_that_was_tried_is_reported_as_reachable() -> None:
    (finding,) = [one for one in checks.check_host(GOOD, NOW) if one.code == "migration-ports"]
    assert finding.text == "can reach TCP port 49152 of beta"


def test_nothing_is_wrong_with_a_good_host() -> None:
    assert wrong(GOOD) == {}


@pytest.mark.parametrize(
    ("examined", "code", "severity"),
    [
        (Examined(host=HOST, facts_error="no answer", probe=PROBE), "libvirt", Severity.BLOCKER),
        (facts(libvirt_version="8.10.0"), "libvirt-version", Severity.BLOCKER),
        (facts(qemu_version="7.1.9"), "qemu-version", Severity.BLOCKER),
        (replace(GOOD, twins=(twin(one=False),)), "same-libvirt", Severity.BLOCKER),
        (replace(GOOD, twins=(twin(one=None),)), "same-libvirt", Severity.BLOCKER),
        (replace(GOOD, twins=(twin(one=True),)), "one-host", Severity.BLOCKER),
        (replace(GOOD, kvm_boots=False), "accelerator", Severity.WARNING),
        (facts(memory_free=Bytes(100 << 20)), "memory", Severity.WARNING),
        (replace(GOOD, probe_error="no login"), "ssh", Severity.BLOCKER),
        (replace(GOOD, host=replace(HOST, ssh=None)), "ssh", Severity.WARNING),
        (probed(clock_skew=Seconds(-3.0)), "clock-skew", Severity.WARNING),
        (probed(userfaultfd=False), "post-copy", Severity.WARNING),
        (probed(post_copy_by_root_only=True), "post-copy", Severity.WARNING),
        (probed(memory_backing_kind="ext2/ext3"), "shared-memory", Severity.WARNING),
        *((probed(no_trace=why), "watchdog", Severity.WARNING) for why in NoTrace),
        (probed(storage_free={}), "storage", Severity.WARNING),
        (probed(storage_free={"/srv": Bytes(1)}), "storage", Severity.WARNING),
        (probed(certificates={"/x.pem": "no"}), "certificate", Severity.WARNING),
        (replace(GOOD, logins={"beta": "refused"}), "peer-login", Severity.WARNING),
        (replace(GOOD, ports={"beta": False}), "migration-ports", Severity.BLOCKER),
        (fenced(1), "fence", Severity.WARNING),
        (fenced(2), "fence", Severity.WARNING),
        (fenced(None), "fence", Severity.WARNING),
        (unasked("no such agent"), "fence", Severity.WARNING),
        (fenced(0, too_open=("/etc/p",)), "fence-password", Severity.WARNING),
    ],
)
def test_each_fault_is_found_and_has_a_mend(
    examined: Examined, code: str, severity: Severity
) -> None:
    assert wrong(examined) == {code: severity}


@pytest.mark.parametrize(
    ("changes", "severity", "told"),
    [
        ({"kernel": (6, 7)}, Severity.OK, "can be tracked (Linux 6.7)"),
        ({"kernel": (6, 8), "untested": True}, Severity.INFO, "; this is untested on arm64"),
        (
            {"kernel": (6, 1)}, Severity.INFO,
            "all memory: Linux is 6.1; 6.7 or later is needed, and the kernel has no soft-dirty",
        ),
        (
            {"kernel": (6, 1), "soft_dirty": True}, Severity.INFO,
            "only by soft-dirty bits, which is slower, and snapshots read all memory: Linux is 6.1",
        ),
        (
            {"kernel": (6, 18), "no_trace": NoTrace.YAMA}, Severity.INFO,
            "all memory: kernel.yama.ptrace_scope = 3 forbids ptrace(2)",
        ),
    ],
)  # fmt: skip
def test_it_is_told_whether_writes_can_be_tracked(
    changes: dict[str, Any], severity: Severity, told: str
) -> None:
    (found,) = (
        one for one in checks.check_host(probed(**changes), NOW) if one.code == "write-tracking"
    )
    assert found.severity is severity
    assert told in found.text
    assert (found.hint is None) == (severity is Severity.OK)


@pytest.mark.parametrize(
    ("changes", "severity", "told"),
    [
        ({}, Severity.OK, "enforced by the kernel and a watchdog"),
        (
            {"untested": True}, Severity.INFO,
            "enforced by the kernel and a watchdog; this is untested on arm64",
        ),
        (
            {"no_trace": NoTrace.YAMA, "systemd": True}, Severity.INFO,
            "enforced by a watchdog in a systemd unit of its own (not by the kernel:"
            " kernel.yama.ptrace_scope = 3 forbids ptrace(2))",
        ),
        (
            {"no_trace": NoTrace.CAPABILITY}, Severity.WARNING,
            "enforced by two watchdogs that restart each other (not by the kernel:"
            " the ssh login lacks CAP_SYS_PTRACE)",
        ),
    ],
)  # fmt: skip
def test_it_is_told_what_would_enforce_leases(
    changes: dict[str, Any], severity: Severity, told: str
) -> None:
    (found,) = [one for one in checks.check_host(probed(**changes), NOW) if one.code == "watchdog"]
    assert (found.severity, found.text) == (severity, f"leases of protected guests are {told}")


def test_a_skew_that_the_round_trip_explains_is_none() -> None:
    assert wrong(probed(clock_skew=Seconds(0.3), clock_uncertainty=Seconds(0.25))) == {}


@pytest.mark.parametrize(
    ("days", "severity"), [(10, None), (350, Severity.WARNING), (400, Severity.BLOCKER)]
)
def test_certificates_are_warned_of_before_they_end(days: int, severity: Severity | None) -> None:
    pem = certificates.Authority("test").issue("alpha", ["10.0.0.1"])[1].decode()
    found = wrong(probed(certificates={"/x.pem": pem}), NOW + timedelta(days=days))

    assert found == ({} if severity is None else {"certificate": severity})


@pytest.mark.parametrize(
    ("examined", "told"),
    [
        (fenced(0), "alpha: fence_ipmilan reports power on"),
        (
            fenced(2),
            "alpha: fence_ipmilan reports power off, but alpha answers: the device controls"
            " another machine",
        ),
        (
            fenced(1),
            "alpha: fence_ipmilan does not report the power state: the fence agent exited with 1",
        ),
        (fenced(None), "does not report the power state: no answer within 15.0 s"),
        (unasked("no such agent", "install it"), "alpha: no such agent"),
        (
            replace(fenced(2), facts=None, facts_error="no answer"),
            "alpha: fence_ipmilan reports power off",
        ),
    ],
)
def test_a_fence_agent_is_told_of(examined: Examined, told: str) -> None:
    (found,) = [one for one in checks.check_host(examined, NOW) if one.code == "fence"]
    assert told in f"{found.where}: {found.text}"
    assert (found.severity is Severity.OK) == (found.hint is None)


@pytest.mark.parametrize(
    ("examined", "code", "hint"),
    [
        (replace(GOOD, probe_error="refused; closed"), "ssh", "run ssh -p 22 -i /k root@alpha"),
        (replace(GOOD, probe_error="refused; closed", probe_hint="set it"), "ssh", "set it"),
        (unasked("refused; closed"), "fence", "correct the fence: entry of alpha in the inventory"),
        (unasked("refused; closed", "set it"), "fence", "set it"),
    ],
)
def test_an_error_that_contains_a_semicolon_is_shown_completely(
    examined: Examined, code: str, hint: str
) -> None:
    (found,) = [one for one in checks.check_host(examined, NOW) if one.code == code]
    assert (found.text, found.hint) == ("refused; closed", hint)


def test_each_device_of_a_host_is_told_of() -> None:
    def told(examined: Examined) -> list[tuple[bool, str]]:
        found = [one for one in checks.check_host(examined, NOW) if one.code == "fence"]
        return [(one.severity is Severity.OK, one.text) for one in found]

    assert told(fenced(0, 1)) == [
        (True, "device 0 reports power on"),
        (False, "device 1 does not report the power state: the fence agent exited with 1"),
    ]
    # One of two supplies that is off: the host runs on the other one.
    assert told(fenced(2, 0)) == [
        (False, "device 0 reports power off: alpha runs on its other power supplies only"),
        (True, "device 1 reports power on"),
    ]
    wrong = (
        "reports power off, but alpha answers: the device controls another machine, or alpha has a"
        " power supply that is not in the inventory"
    )
    assert told(fenced(2, 2)) == [(False, f"device 0 {wrong}"), (False, f"device 1 {wrong}")]
    assert told(fenced(0, 2, levels=2))[1] == (False, f"device 1 {wrong}")
