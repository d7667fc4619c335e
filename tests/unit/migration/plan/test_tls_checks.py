"""Can a stream be encrypted, and under which name?"""

import datetime
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from tests.support.builders import HOST
from tests.support.following import take
from vmckpt.errors import RemoteError
from vmckpt.migration.plan.tls_checks import TlsVerdict, names_of, tls_findings
from vmckpt.model.finding import Severity
from vmckpt.model.host import CA, CLIENT, CLIENT_KEY, SERVER, SERVER_KEY, QemuCertificates
from vmckpt.remote import probe
from vmckpt_lab import packet_capture
from vmckpt_lab.certificates import Authority

NOW = datetime.datetime.now(datetime.UTC)
OURS, THEIRS = Authority("ours"), Authority("theirs")
ALL = frozenset({CA, SERVER, SERVER_KEY, CLIENT, CLIENT_KEY})


def issued(
    name: str, addresses: tuple[str, ...] = (), by: Authority = OURS, ca: Authority = OURS
) -> QemuCertificates:
    pem = by.issue(name, list(addresses))[1].decode()
    return QemuCertificates(
        folder="/etc/pki/qemu", verifies_clients=True, present=ALL, hostname=name,
        pems={CA: ca.pem.decode(), SERVER: pem, CLIENT: pem},
    )  # fmt: skip


def closed(one: QemuCertificates) -> QemuCertificates:
    return replace(one, unreadable=frozenset({SERVER_KEY}), user="qemu")


ALPHA, BETA = issued("alpha"), issued("beta", ("10.1.0.12",))
NAMES = ("b", "10.0.0.2", "beta", "10.1.0.12")


def without(has: QemuCertificates, *names: str) -> QemuCertificates:
    pems = {name: pem for name, pem in has.pems.items() if name not in names}
    return replace(has, present=has.present - set(names), pems=pems)


def verdict(
    at_source: QemuCertificates | None = ALPHA,
    at_target: QemuCertificates | None = BETA,
    names: tuple[str, ...] = NAMES,
    now: datetime.datetime = NOW,
) -> TlsVerdict:
    return tls_findings(
        source="alpha", target="beta", at_source=at_source, at_target=at_target, names=names,
        now=now,
    )  # fmt: skip


def codes(found: TlsVerdict) -> list[tuple[str, str]]:
    return [(finding.code, finding.where) for finding in found.findings]


@pytest.mark.parametrize(
    ("target", "names", "name"),
    [
        (BETA, NAMES, "beta"),
        (BETA, ("10.1.0.12", "beta"), "10.1.0.12"),
        (BETA, ("BETA",), "BETA"),
        (BETA, ("beta.example", "gamma"), None),
        (BETA, (), None),
        (issued("*.lab.example"), ("beta", "beta.lab.example"), "beta.lab.example"),
        (issued("*.lab.example"), ("a.b.lab.example", "lab.example"), None),
        (issued("beta", ("2001:db8::2",)), ("2001:DB8:0::2",), "2001:DB8:0::2"),
    ],
)
def test_the_name_is_the_first_that_the_certificate_carries(
    target: QemuCertificates, names: tuple[str, ...], name: str | None
) -> None:
    found = verdict(at_target=target, names=names)

    assert found.name == name
    assert codes(found) == ([] if name else [("tls-name", "beta")])


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        (without(ALPHA, CA), BETA, [("tls-missing", "alpha")]),
        (without(ALPHA, CLIENT, CLIENT_KEY), BETA, [("tls-missing", "alpha")]),
        (without(ALPHA, SERVER, SERVER_KEY), without(BETA, CLIENT, CLIENT_KEY), []),
        (without(ALPHA, CLIENT, CLIENT_KEY), replace(BETA, verifies_clients=False), []),
        (
            without(ALPHA, CLIENT_KEY),
            replace(BETA, verifies_clients=False),
            [("tls-missing", "alpha")],
        ),
        (ALPHA, without(BETA, SERVER_KEY), [("tls-missing", "beta")]),
        (ALPHA, closed(BETA), [("tls-unreadable", "beta")]),
        (closed(ALPHA), BETA, []),
        (without(ALPHA, *ALL), without(BETA, *ALL),
         [("tls-missing", "alpha"), ("tls-missing", "beta")]),
        (issued("alpha", by=THEIRS), BETA, [("tls-authority", "alpha")]),
        (issued("alpha", by=THEIRS), replace(BETA, verifies_clients=False), []),
        (ALPHA, issued("beta", by=THEIRS), [("tls-authority", "beta")]),
        (ALPHA, issued("beta", ca=THEIRS), [("tls-authority", "alpha")]),
        (ALPHA, replace(BETA, pems={**BETA.pems, SERVER: "no pem"}), [("tls-invalid", "beta")]),
    ],
)  # fmt: skip
def test_what_is_missing_or_does_not_fit(
    source: QemuCertificates, target: QemuCertificates, found: list[tuple[str, str]]
) -> None:
    seen = verdict(source, target)

    assert codes(seen) == found
    assert (seen.name is None) == bool(found)
    assert all(finding.hint for finding in seen.findings)


@pytest.mark.parametrize(
    ("days", "words"), [(-1, "is not valid before"), (366, "expired on"), (364, None)]
)
def test_dates(days: int, words: str | None) -> None:
    found = verdict(now=NOW + datetime.timedelta(days=days))

    assert (found.name is None) == (words is not None)
    assert all(words in finding.text for finding in found.findings if words is not None)
    assert {finding.where for finding in found.findings} == ({"alpha", "beta"} if words else set())


def test_without_a_look_the_first_name_is_tried() -> None:
    found = verdict(at_target=None)

    assert found.name == "b"
    assert codes(found) == [("tls-unproven", "beta")]
    assert found.findings[0].severity is Severity.WARNING


def test_a_certificate_that_cannot_be_read_is_a_warning() -> None:
    found = verdict(at_target=replace(BETA, pems={}))

    assert (found.name, codes(found)) == ("b", [("tls-unproven", "beta"), ("tls-unproven", "beta")])


def test_a_common_name_counts_where_there_is_no_other() -> None:
    ca = x509.load_pem_x509_certificate(OURS.pem)
    assert ca.subject.rfc4514_string() == "CN=vmckpt lab ours"
    target = replace(BETA, pems={**BETA.pems, SERVER: THEIRS.pem.decode(), CA: ""})
    source = replace(ALPHA, pems={**ALPHA.pems, CA: THEIRS.pem.decode()})
    found = verdict(source, replace(target, verifies_clients=False), ("vmckpt lab theirs",))

    assert "tls-name" not in [code for code, _ in codes(found)]


def test_names_of_a_host() -> None:
    host = replace(HOST, migration_address="10.1.0.11")

    assert names_of(host, "alpha.example") == ("alpha", "alpha.example", "10.1.0.11")
    assert names_of(replace(host, ssh=None, migration_address=None), None) == ("alpha",)


def test_the_answer_of_a_host_is_read() -> None:
    text = "folder /etc/pki/x\nverify 0\nhostname beta\npresent ca-cert.pem\npem ca-cert.pem YWJj\n"

    assert probe.parse_certificates(text, "beta") == QemuCertificates(
        folder="/etc/pki/x", verifies_clients=False, present=frozenset({CA}), pems={CA: "abc"},
        hostname="beta",
    )  # fmt: skip
    found = probe.parse_certificates(f"{text}user qemu\nunreadable ca-cert.pem\n", "beta")
    assert (found.user, found.unreadable) == ("qemu", frozenset({CA}))
    with pytest.raises(RemoteError, match="invalid answer"):
        probe.parse_certificates("Welcome!\n", "beta")


@pytest.mark.parametrize(
    ("port", "payload"), [(49152, b"abc"), (49215, b"abc"), (16509, None), (49216, None)]
)
def test_only_migration_ports_are_listened_to(port: int, payload: bytes | None) -> None:
    ethernet = bytes(12) + b"\x08\x00"
    ip = bytes([0x45, 0, 0, 43, 0, 0, 0, 0, 64, 6]) + bytes(10)
    tcp = (40000).to_bytes(2, "big") + port.to_bytes(2, "big") + bytes(8) + b"\x50" + bytes(7)

    assert packet_capture.migration_payload(ethernet + ip + tcp + b"abc") == payload
    assert packet_capture.migration_payload(b"\x86\xdd" + ethernet) is None


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ('default_tls_x509_cert_dir = "/etc/a"', "/etc/a"),
        ('\tdefault_tls_x509_cert_dir="/etc/a"  # ours', "/etc/a"),
        ("default_tls_x509_cert_dir\t= '/etc/a#1' # ours", "/etc/a#1"),
        ('default_tls_x509_cert_dir = "/etc/b"\ndefault_tls_x509_cert_dir = "/etc/a"', "/etc/a"),
        ('#default_tls_x509_cert_dir = "/etc/b"', "/etc/pki/qemu"),
        ('xdefault_tls_x509_cert_dir = "/etc/b"', "/etc/pki/qemu"),
    ],
)
def test_libvirts_configuration_is_read_as_it_reads_it(
    tmp_path: Path, line: str, folder: str
) -> None:
    conf = tmp_path / "qemu.conf"
    conf.write_text(f'user = "root" # as ever\n{line}\ndefault_tls_x509_verify = 0 # no\n')
    script = probe._CERTIFICATES_SCRIPT.replace("/etc/libvirt/qemu.conf", str(conf))
    words = ["sh", "-s", "--", *sorted(ALL)]
    done = subprocess.run(words, input=script, capture_output=True, text=True, check=True)
    found = probe.parse_certificates(done.stdout, "alpha")
    assert (found.folder, found.verifies_clients, found.user) == (folder, False, "")


@pytest.mark.parametrize(
    ("mode", "key", "found"),
    [
        (0o755, 0o644, set()),
        (0o755, 0o600, {SERVER_KEY}),
        (0o700, 0o644, {"."}),
    ],
)
def test_what_qemus_user_may_not_read_is_tried(mode: int, key: int, found: set[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(mode)
        for one in (CA, SERVER, SERVER_KEY):
            (place / one).write_text(one)
        (place / SERVER_KEY).chmod(key)
        conf = place / "qemu.conf"
        conf.write_text(
            f'user = "+65534"\ngroup = "nogroup"\nmigrate_tls_x509_cert_dir = "{place}"\n'
        )
        script = probe._CERTIFICATES_SCRIPT.replace("/etc/libvirt/qemu.conf", str(conf))
        words = ["sh", "-s", "--", *sorted(ALL)]
        done = subprocess.run(words, input=script, capture_output=True, text=True, check=True)
    told = probe.parse_certificates(done.stdout, "alpha")
    assert (told.user, set(told.unreadable)) == ("65534", found)


def _seen(place: Path) -> QemuCertificates:
    """What the host reports about the certificates in a directory."""
    conf = place.parent / "qemu.conf"
    conf.write_text(f'user = "+65534"\ngroup = "nogroup"\nmigrate_tls_x509_cert_dir = "{place}"\n')
    script = probe._CERTIFICATES_SCRIPT.replace("/etc/libvirt/qemu.conf", str(conf))
    words = ["sh", "-s", "--", *sorted(ALL)]
    done = subprocess.run(words, input=script, capture_output=True, text=True, check=True)
    return replace(probe.parse_certificates(done.stdout, "beta"), hostname="beta")


def test_qemu_reads_its_certificates_after_each_hint_was_followed() -> None:
    """First a directory above them is closed, then theirs, then each key."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "pki" / "of qemu"
        place.mkdir(parents=True)
        place.chmod(0o700)
        for one in ALL:
            (place / one).write_text(BETA.pems.get(one, "key"))
            (place / one).chmod(0o600 if one == SERVER_KEY else 0o644)
        for command in ("chmod", "chmod", "chown"):
            (found,) = verdict(at_target=_seen(place)).findings
            ((program, *words),) = (one.words for one in take(found.hint or ""))
            assert (found.code, program) == ("tls-unreadable", command)
            subprocess.run((program, *words), check=True)
        assert verdict(at_target=_seen(place)).findings == ()
