"""A domain's salt in a file, to carry it to another controller that writes into the same domain."""

from pathlib import Path

from vmckpt.errors import KeyRefused
from vmckpt.store import identities, keyfiles
from vmckpt.store.identities import COST, LOCKED, Passphrase
from vmckpt.store.keyring import Keyring
from vmckpt.store.keytexts import KeyKind, read, show


def write(ring: Keyring, path: Path, passphrase: str | None, *, cost: int = COST) -> str:
    """Put the domain's salt into a new file; the domain. Raises KeyRefused."""
    line = ring.export_salt()
    if passphrase is not None:
        salt = read(line, KeyKind.SALT)
        line = show(KeyKind.LOCKED_SALT, identities.locked(salt, passphrase, cost))
    told = (
        "# Who has this and may read the store can find out whether it has what he can guess.\n"
        f"{line}\n"
    )
    if not keyfiles.write(path, told):
        raise KeyRefused(f"{path} is there already", mend="name another file")
    domain = ring.domain()
    assert domain is not None
    return domain


def load(ring: Keyring, path: Path, passphrase: Passphrase | None) -> str:
    """Join the domain whose salt is in a file; the domain. Raises KeyRefused."""
    told = keyfiles.read(path, secret=True)
    if told is None:
        raise KeyRefused(f"{path}: no such file", mend="vmckpt snapshot keys export-salt makes one")
    lines = [line.strip() for line in told.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) != 1:
        raise KeyRefused(f"{path}: it has {len(lines)} keys, not one", mend="name the right file")
    [line] = lines
    if line.startswith(f"{KeyKind.LOCKED_SALT}:"):
        box = read(line, KeyKind.LOCKED_SALT, length=LOCKED, where=str(path))
        if passphrase is None:
            raise KeyRefused(f"{path}: it has a passphrase", mend="run it where it can be asked")
        line = show(KeyKind.SALT, identities.unlocked(box, passphrase, str(path)))
    else:
        read(line, KeyKind.SALT, where=str(path))
    ring.import_salt(line)
    domain = ring.domain()
    assert domain is not None
    return domain
