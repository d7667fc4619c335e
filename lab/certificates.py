"""Create a lab's keys: a certificate authority, and certificates and ssh keys for its machines."""

import datetime
import ipaddress
import shutil
from importlib import resources
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE = datetime.timedelta(days=365)


class Authority:
    """Signs certificates that both libvirt and QEMU accept, as server and as client."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(f"vmckpt lab {name}")
        self.certificate = (
            _builder(subject, subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, name: str, addresses: list[str]) -> tuple[bytes, bytes]:
        """Return a private key and a certificate in PEM format, for a name and its addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(name)]
        names += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        certificate = (
            _builder(_subject(name), self.certificate.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return _private_pem(key), certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIFE)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_encipherment=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def install(
    authority: Authority, etc: Path, name: str, addresses: list[str], *, qemu_user: str = "root"
) -> None:
    """Write a host's certificates to the default paths of libvirt and QEMU.

    `etc`: the host's /etc; `name`, `addresses`: of the host, for the certificate; `qemu_user`: the
    owner of QEMU's keys.
    """
    key, certificate = authority.issue(name, addresses)
    _write(etc / "pki/CA/cacert.pem", authority.pem)
    for role in ("server", "client"):
        _write(etc / f"pki/libvirt/{role}cert.pem", certificate)
        _write(etc / f"pki/libvirt/private/{role}key.pem", key, mode=0o600)
        _write(etc / f"pki/qemu/{role}-cert.pem", certificate)
        _write(etc / f"pki/qemu/{role}-key.pem", key, mode=0o600)
        shutil.chown(etc / f"pki/qemu/{role}-key.pem", qemu_user)
    _write(etc / "pki/qemu/ca-cert.pem", authority.pem)
    # Without this file, each QEMU first generates parameters for an incoming encrypted migration.
    assets = resources.files("vmckpt_lab") / "assets"
    _write(etc / "pki/qemu/dh-params.pem", assets.joinpath("dh-params.pem").read_bytes())


def install_client(authority: Authority, folder: Path) -> None:
    """Write the controller's certificate in the layout of libvirt's `pkipath`."""
    key, certificate = authority.issue("controller", [])
    _write(folder / "cacert.pem", authority.pem)
    _write(folder / "clientcert.pem", certificate)
    _write(folder / "clientkey.pem", key, mode=0o600)


def ssh_key(path: Path) -> str:
    """Write a new ed25519 ssh key. Returns the public key, as one line."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write(path, private, mode=0o600)
    _write(path.with_suffix(".pub"), public + b"\n")
    return public.decode()


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
