"""The certificates with which QEMU encrypts migration streams."""

from collections.abc import Mapping
from dataclasses import dataclass

CA = "ca-cert.pem"
SERVER = "server-cert.pem"
SERVER_KEY = "server-key.pem"
CLIENT = "client-cert.pem"
CLIENT_KEY = "client-key.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuCertificates:
    """What a host has of them, in the folder that its libvirt uses for migrations."""

    folder: str
    verifies_clients: bool
    """It accepts a stream only from whoever has a certificate."""
    present: frozenset[str]
    """The files that are there, keys included, by name."""
    pems: Mapping[str, str]
    """Text of the certificates among them, by name. Keys are never read."""
    hostname: str
    """What the host calls itself."""
    unreadable: frozenset[str] = frozenset()
    """Those of `present` that QEMU may not read, "." if it may not enter the folder; none if that
    could not be tried."""
    user: str = ""
    """As whom QEMU runs, if it is not root and known."""
