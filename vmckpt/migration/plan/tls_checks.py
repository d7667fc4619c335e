"""Check whether a stream between two hosts can be encrypted, and for which name. Pure.

QEMU itself finds most problems only after the target's process has started, and reports them in the
log of one of the two hosts.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from shlex import quote

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from vmckpt.model.finding import Finding, Severity, blocker
from vmckpt.model.host import (
    ADD_SSH,
    CA,
    CLIENT,
    CLIENT_KEY,
    SERVER,
    SERVER_KEY,
    Host,
    QemuCertificates,
)

_GUIDE = "see libvirt's TLS guide (kbase/tlscerts)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsVerdict:
    """Whether a stream can be encrypted, as far as is known before the migration starts."""

    name: str | None
    """The value for `MoveOrder.tls_name`; None: no encryption."""
    findings: tuple[Finding, ...]
    """Reasons why the stream cannot be encrypted, and facts that could not be checked."""


def names_of(host: Host, hostname: str | None) -> tuple[str, ...]:
    """Return the names that a host's certificate may be issued for, in order of preference."""
    known = [host.name, host.ssh.address if host.ssh else None, hostname, host.migration_address]
    return tuple(dict.fromkeys(name for name in known if name))


def tls_findings(
    *,
    source: str,
    target: str,
    at_source: QemuCertificates | None,
    at_target: QemuCertificates | None,
    names: Sequence[str],
    now: datetime,
) -> TlsVerdict:
    """Check whether the stream between two hosts can be encrypted.

    `source`, `target`: host names. `names`: the names that the target's certificate may be issued
    for. If a host's certificates are unknown (None), the first name is used without a check, and
    QEMU reports any error.
    """
    if at_source is None or at_target is None:
        unseen = source if at_source is None else target
        text = "QEMU's certificates could not be read"
        hint = ADD_SSH
        warning = _finding("tls-unproven", Severity.WARNING, unseen, text, hint)
        return TlsVerdict(name=names[0] if names else None, findings=(warning,))
    found = [*_missing(source, target, at_source, at_target)]
    for host, has, needed in (
        (source, at_source, (CA, CLIENT)),
        (target, at_target, (CA, SERVER)),
    ):
        for name in needed:
            if name in has.pems:
                found += _valid(host, f"{has.folder}/{name}", has.pems[name], now)
    if not any(finding.severity is Severity.BLOCKER for finding in found):
        found += _signed(source, target, at_source, at_target)
    if any(finding.severity is Severity.BLOCKER for finding in found):
        return TlsVerdict(name=None, findings=tuple(found))
    fitting, carried = tuple(names), list[str]()
    if SERVER in at_target.pems:
        carried = _carried(_read(at_target.pems[SERVER])[0])
        fitting = tuple(name for name in names if _matches(name, carried))
    if not fitting:
        found.append(
            blocker(
                "tls-name",
                target,
                f"{at_target.folder}/{SERVER} is issued for {', '.join(carried) or 'no name'}, but"
                f" the host is known as {', '.join(names) or 'nothing'}",
                f"issue a certificate for {names[0]}" if names else _GUIDE,
            )
        )
    return TlsVerdict(name=fitting[0] if fitting else None, findings=tuple(found))


def _finding(
    code: str, severity: Severity, where: str, text: str, hint: str | None = None
) -> Finding:
    return Finding(code=code, severity=severity, where=where, text=text, hint=hint)


def _missing(
    source: str, target: str, at_source: QemuCertificates, at_target: QemuCertificates
) -> Iterator[Finding]:
    """Yield findings about missing or unreadable files. The target is the TLS server."""
    client = at_target.verifies_clients or bool({CLIENT, CLIENT_KEY} & at_source.present)
    for host, has, needed in (
        (source, at_source, (CA, CLIENT, CLIENT_KEY) if client else (CA,)),
        (target, at_target, (CA, SERVER, SERVER_KEY)),
    ):
        if gone := [name for name in needed if name not in has.present]:
            text = f"no {', '.join(gone)} in {has.folder}"
            yield blocker("tls-missing", host, text, _GUIDE)
        if "." in has.unreadable:
            text = f"QEMU, which runs as {has.user}, cannot enter {has.folder}"
            closed = quote(has.closed or has.folder)
            yield blocker("tls-unreadable", host, text, f"run chmod o+x {closed} there")
        for name in sorted(has.unreadable & set(needed)):
            path = f"{has.folder}/{name}"
            text = f"QEMU, which runs as {has.user}, cannot read {path}"
            yield blocker("tls-unreadable", host, text, f"run chown {has.user} {quote(path)} there")
        for name in needed:
            if name in has.present and name.endswith("cert.pem") and name not in has.pems:
                text = f"{has.folder}/{name} cannot be read by the ssh login"
                yield _finding("tls-unproven", Severity.WARNING, host, text)


def _read(pem: str) -> list[x509.Certificate]:
    """Return the certificates in PEM text, the host's own first; empty if the text is invalid."""
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError:
        return []


def _valid(host: str, path: str, pem: str, now: datetime) -> Iterator[Finding]:
    certificates = _read(pem)
    if not certificates:
        yield blocker("tls-invalid", host, f"{path} contains no certificate", f"replace {path}")
        return
    first = certificates[0]
    if now < first.not_valid_before_utc:
        begins = f"{first.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        text = f"{path} is not valid before {begins}"
        yield blocker("tls-invalid", host, text, "wait, or correct the clock of this machine")
    if now > first.not_valid_after_utc:
        text = f"{path} expired on {first.not_valid_after_utc:%Y-%m-%d}"
        yield blocker("tls-invalid", host, text, f"renew {path}")


def _signed(
    source: str, target: str, at_source: QemuCertificates, at_target: QemuCertificates
) -> Iterator[Finding]:
    """Check that the source trusts the issuer of the target's certificate.

    If the target verifies clients, also check that the target trusts the source's issuer.
    """
    pairs = [(target, at_target, SERVER, source, at_source)]
    if at_target.verifies_clients:
        pairs.append((source, at_source, CLIENT, target, at_target))
    for host, has, name, judge, trusts in pairs:
        if name not in has.pems or CA not in trusts.pems:
            continue
        chain = _read(has.pems[name])
        known = _read(trusts.pems[CA])
        if not any(_issued(one, authority) for one in chain for authority in known):
            yield blocker(
                "tls-authority",
                host,
                f"{has.folder}/{name} is issued by {chain[0].issuer.rfc4514_string()}, which is"
                f" not in {judge}'s {trusts.folder}/{CA}",
                "use certificates from the same authority on both hosts",
            )


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _carried(certificate: x509.Certificate) -> list[str]:
    """Return the names in a certificate; the common name only if there are no other names."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return [str(one.value) for one in common]
    names = extension.value
    addresses = names.get_values_for_type(x509.IPAddress)
    return [*names.get_values_for_type(x509.DNSName), *map(str, addresses)]


def _matches(wanted: str, carried: Sequence[str]) -> bool:
    """Return whether a certificate is issued for a name.

    Case is ignored, "*." stands for one label, and IP addresses are compared by value.
    """
    return any(_same(wanted.lower(), name.lower()) for name in carried)


def _same(wanted: str, name: str) -> bool:
    if wanted == name:
        return True
    try:
        return ipaddress.ip_address(wanted) == ipaddress.ip_address(name)
    except ValueError:
        label, _, rest = wanted.partition(".")
        return bool(label) and "." in rest and name == f"*.{rest}"
