"""A snapshot's data key, wrapped for each administrator. When keys change, the object is replaced.

    0   8   magic "vmckptW" and a line feed
    8   2   version, little endian: 1
    10  2   number of keys
    12  96  for each key: 16 bytes of key ID, 80 bytes of HPKE ciphertext
        32  BLAKE3 of all preceding bytes

The data key is wrapped with HPKE (RFC 9180) in base mode: X25519, HKDF-SHA256, AES-256-GCM. HPKE's
info parameter contains the snapshot's ID, so a wrap is useless for another snapshot. Wraps need no
signature. An attacker that can replace wraps can also delete them, and a wrap of a different data
key does not decrypt anything.

Pure.
"""

from collections.abc import Collection, Iterator

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from vmckpt.errors import KeyRefused, StoreDamaged, StoreNewer
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import fingerprint, key_id

MAGIC = b"vmckptW\n"
VERSION = 1
DATA_KEY = 32
MOST = 256
"""Maximum number of administrators' keys for which a snapshot is encrypted."""
_ID = 16
_WRAP = 32 + DATA_KEY + 16
_HEAD = len(MAGIC) + 4
_SUM = 32


def wrap(data_key: bytes, snapshot: str, admins: Collection[bytes]) -> bytes:
    """Wrap a data key for the administrators' public keys. Returns the wraps object.

    `snapshot`: ID of the snapshot whose data key this is. Raises KeyRefused if there are no keys or
    too many keys, or if a key is not usable.
    """
    if not 0 < len(set(admins)) <= MOST:
        raise KeyRefused(
            f"a snapshot must have 1 to {MOST} administrators' keys, not {len(set(admins))}"
        )
    return put_together(
        [(key_id(one), _wrap(data_key, snapshot, one)) for one in sorted(set(admins))]
    )


def put_together(wrapped: Collection[tuple[bytes, bytes]]) -> bytes:
    """Build a wraps object from pairs of key ID and HPKE ciphertext."""
    head = MAGIC + VERSION.to_bytes(2, "little") + len(wrapped).to_bytes(2, "little")
    body = head + b"".join(name + box for name, box in wrapped)
    return body + blake3(body).digest()


def recipients(data: bytes, snapshot: str) -> tuple[str, ...]:
    """Return the fingerprints of the keys for which a data key is wrapped.

    Raises StoreDamaged or StoreNewer.
    """
    return tuple(name.hex() for name, _ in _parse(data, snapshot))


def unwrap(data: bytes, snapshot: str, identity: X25519PrivateKey) -> bytes:
    """Unwrap a data key with an identity.

    Raises StoreDamaged, StoreNewer, and KeyRefused if the data key is not wrapped for this identity
    or the wrap belongs to another snapshot.
    """
    public = public_of(identity)
    boxes = [box for name, box in _parse(data, snapshot) if name == key_id(public)]
    if not boxes:
        raise KeyRefused(
            f"snapshot {snapshot} is not encrypted for this identity (key {fingerprint(public)})",
            hint="specify another file with --identity; to list the keys, run vmckpt snapshot show"
            f" {snapshot}",
        )
    try:
        data_key = _suite().decrypt(boxes[0], identity, info(snapshot))
    except InvalidTag as exc:
        raise KeyRefused(
            f"the wrap for this identity in {_where(snapshot)} belongs to another snapshot",
            hint="run vmckpt snapshot verify --repair --from STORE",
        ) from exc
    if len(data_key) != DATA_KEY:
        raise _damaged(snapshot, "a wrapped key has the wrong length")
    return data_key


def info(snapshot: str) -> bytes:
    """Return HPKE's info parameter, which binds a wrap to the snapshot."""
    return b"vmckpt data key v1\0" + snapshot.encode()


def _wrap(data_key: bytes, snapshot: str, public: bytes) -> bytes:
    try:
        return _suite().encrypt(data_key, X25519PublicKey.from_public_bytes(public), info(snapshot))
    except ValueError as exc:
        raise KeyRefused(f"key {fingerprint(public)} is not secure for encryption") from exc


def _suite() -> Suite:
    return Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


def _parse(data: bytes, snapshot: str) -> Iterator[tuple[bytes, bytes]]:
    if len(data) < _HEAD + _SUM or not data.startswith(MAGIC):
        raise _damaged(snapshot, "it is not a wraps object")
    version = int.from_bytes(data[8:10], "little")
    count = int.from_bytes(data[10:12], "little")
    # The checksum is verified before the version, so that a flipped bit is not mistaken for a newer
    # version.
    if blake3(data[:-_SUM]).digest() != data[-_SUM:]:
        raise _damaged(snapshot, "its checksum is wrong")
    if version > VERSION:
        raise StoreNewer(
            f"{_where(snapshot)} has version {version}; this vmckpt supports versions up to"
            f" {VERSION}",
            hint="use the vmckpt version that wrote the wraps, or a newer one",
        )
    if version != VERSION or len(data) != _HEAD + count * (_ID + _WRAP) + _SUM:
        raise _damaged(snapshot, "its length is wrong")
    for at in range(_HEAD, len(data) - _SUM, _ID + _WRAP):
        yield data[at : at + _ID], data[at + _ID : at + _ID + _WRAP]


def _where(snapshot: str) -> str:
    return f"wraps/{snapshot}"


def _damaged(snapshot: str, what: str) -> StoreDamaged:
    return StoreDamaged(
        f"{_where(snapshot)}: {what}",
        hint="run vmckpt snapshot verify --repair --from STORE",
    )
