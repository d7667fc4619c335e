"""Faults of certain versions of QEMU and libvirt, and whether a host or a move is affected. Pure.

Each problem has the source of its facts, and the date on which the source was read. Distributions
backport fixes without changing the version, so a problem is a warning and never a blocker.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Guest
from vmckpt.model.host import HostFacts
from vmckpt.units import GIB, Bytes

Version = tuple[int, ...]


def version(text: str) -> Version:
    """Return the first three numbers of a version like "10.0.2" or "7.2.22+dfsg".

    An unknown version yields an empty tuple, which counts as the oldest.
    """
    match = re.match(r"[0-9]{1,9}(\.[0-9]{1,9}){0,2}", text)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A fault of QEMU or libvirt in a range of versions."""

    code: str
    """Code of the finding."""
    program: str
    """"QEMU" or "libvirt"."""
    since: Version = ()
    """The first version with the fault; empty: all versions before `fixed`."""
    fixed: Version
    """The first version without the fault."""
    text: str
    """What can happen."""
    hint: str
    source: str
    """Where the facts are from: a URL, or a page of this project's documentation."""
    read: date
    """When the source was read."""

    def affects(self, host: HostFacts) -> bool:
        """Return whether the host's version has the fault."""
        return self.since <= version(self._version_on(host)) < self.fixed

    def on(self, host: HostFacts) -> str:
        """Return the text with the host's version."""
        return f"{self.program} {self._version_on(host)}: {self.text} (see {self.source})"

    def _version_on(self, host: HostFacts) -> str:
        return host.qemu_version if self.program == "QEMU" else host.libvirt_version


TCG_LOST_WRITES = Problem(
    code="tcg-lost-writes", program="QEMU", fixed=(9,),
    text="during a long pre-copy, writes of TCG guests are lost, and the guest may crash after the"
    " move",
    hint="boot the guest with pti=on, use KVM, or upgrade to QEMU 9.0 or newer",
    source="docs/adr/0005-tcg-lost-writes.md", read=date(2026, 11, 23),
)  # fmt: skip
TLS_KEYS = Problem(
    code="tls-key-renewal", program="QEMU", fixed=(10, 1),
    text="with a GnuTLS older than 3.8.11, QEMU can crash or lose the connection when the keys of"
    " a long encrypted migration are renewed",
    hint="upgrade to QEMU 10.1 or GnuTLS 3.8.11; on a trusted network, use --tls off",
    source="https://gitlab.com/qemu-project/qemu/-/issues/1937", read=date(2026, 11, 27),
)  # fmt: skip
POST_COPY_RESUME = Problem(
    code="post-copy-resume-crash", program="libvirt", since=(11, 2), fixed=(11, 4),
    text="the daemon crashes if a broken post-copy migration is resumed",
    hint="upgrade to libvirt 11.4, or use a policy without post-copy if the network may fail",
    source="https://libvirt.org/news.html", read=date(2026, 11, 27),
)  # fmt: skip
PROBLEMS = (TCG_LOST_WRITES, TLS_KEYS, POST_COPY_RESUME)

RENEWAL = 64 * GIB
"""The least data after which GnuTLS renews the keys of AES-GCM: 2^24 records of at least a page of
4 KiB. RFC 8446, section 5.5, limits the records to 2^24.5."""
_PASSES = 4
"""A pre-copy can send all of the memory several times before the policy ends it."""


def of_move(
    guest: Guest, source: HostFacts, target: HostFacts, *,
    encrypted: bool, post_copy: bool, travels: Bytes,
) -> Iterator[Finding]:  # fmt: skip
    """Yield a warning for each problem that a move of the guest may meet.

    `encrypted`: the stream uses TLS; `post_copy`: the move may switch to post-copy; `travels`: the
    size of the disks that are copied.
    """
    if (
        guest.accelerator == "qemu"
        and "pti=on" not in guest.kernel_arguments.split()
        and TCG_LOST_WRITES.affects(source)
    ):
        yield _finding(TCG_LOST_WRITES, guest.name, source, Severity.WARNING)
    most = guest.memory * (1 if post_copy else _PASSES) + travels
    if encrypted and most >= RENEWAL:
        yield from _either(TLS_KEYS, guest, source, target)
    if post_copy:
        yield from _either(POST_COPY_RESUME, guest, source, target)


def _either(
    problem: Problem, guest: Guest, source: HostFacts, target: HostFacts
) -> Iterator[Finding]:
    """Yield a problem that one end of a migration is enough for."""
    affected = next((one for one in (source, target) if problem.affects(one)), None)
    if affected is not None:
        yield _finding(problem, guest.name, affected, Severity.WARNING)


def of_host(name: str, facts: HostFacts) -> Iterator[Finding]:
    """Yield a note for each problem that some of the host's guests may meet."""
    for problem in PROBLEMS:
        concerns = problem is not TCG_LOST_WRITES or "kvm" not in facts.accelerators
        if concerns and problem.affects(facts):
            yield _finding(problem, name, facts, Severity.INFO)


def _finding(problem: Problem, where: str, host: HostFacts, severity: Severity) -> Finding:
    return Finding(
        code=problem.code, severity=severity, where=where, text=problem.on(host),
        hint=problem.hint,
    )  # fmt: skip
