"""Real snapshots in real stores: two of them, a keyring, and an inventory that names all."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from tests.fixtures.make_store_v1 import ALICE, FACTS, PUBLIC, locked_identity, secret
from vmckpt.cli import app
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format.chunk_map import SLOTS, UNIT, ZERO, Kind
from vmckpt.store.format.manifest import Keys, Signer, encode
from vmckpt.store.format.metadata import DiskMake, Part, PrivateFacts, RamBlock, new_id
from vmckpt.store.format.private_part import Private, RegionMap
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.identity import public_of, text
from vmckpt.store.keys.key_files import KeyKind, key_text
from vmckpt.store.keys.keyring import Keyring
from vmckpt.store.repository import Store
from vmckpt.units import Bytes

ALICE_KEY = key_text(KeyKind.ADMIN, public_of(ALICE))
STREAM = b"device state" * 99
PER_CHUNK = 4
"""Pages in one chunk."""


def page(number: int, size: int = 4096) -> bytes:
    """Bytes that no compression makes smaller, the same for the same number."""
    return hashlib.shake_128(f"page {number}".encode()).digest(size)


def id_of(name: str) -> str:
    return new_id(blake3(name.encode()).digest())


@dataclass
class Stock:
    """A folder with hosts.yaml, the stores `near` and `far`, and keys."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    made: int = field(default=0)

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Run a command of `vmckpt snapshot`: exit code, stdout, stderr."""
        code = app.run(["snapshot", *args])
        told = self.capsys.readouterr()
        return code, told.out, told.err

    @property
    def ring(self) -> Keyring:
        return Keyring(self.folder / "state" / "keys")

    def store(self, name: str = "near") -> Store:
        return Store.open(LocalFolder(self.folder / name))

    def encrypt(self) -> Path:
        """Turn encryption on, for Alice; her identity file."""
        self.ring.add_admin("alice", ALICE_KEY)
        return self.identity("alice")

    def identity(self, name: str) -> Path:
        """An identity file: Alice's, Bob's, which has a passphrase, or somebody else's."""
        told = {"alice": text(ALICE, None), "bob": locked_identity()}[name]
        path = self.folder / f"{name}.key"
        path.write_text(told)
        path.chmod(0o600)
        return path

    def put(
        self,
        name: str,
        pages: Sequence[int],
        /,
        *,
        in_: str = "near",
        signer: Signer | None = None,
        disk: int = 1,
        domain_xml: str = FACTS.domain_xml,
        **changes: object,
    ) -> str:
        """Publish a snapshot of some pages (-1: zeros) and a disk of one unit; its id.

        `domain_xml`: the guest's definition. `changes`: of the public facts.
        """
        self.made += 1
        ring, store, id_ = self.ring, self.store(in_), id_of(name)
        ring.signing()
        sealing, encrypts = ring.sealing(), ring.encrypts
        data_key = secret(f"data key of {name}") if encrypts else None
        keys = Keys(signer or ring.signing(), ring.salt() if encrypts else None, data_key)
        filled = [number for number in pages if number >= 0]
        plain = [
            b"".join(map(page, filled[at : at + PER_CHUNK]))
            for at in range(0, len(filled), PER_CHUNK)
        ]
        plain += [page(disk, UNIT[Kind.DISK]), STREAM]
        with store.writer(sealing, pack_size=100_000) as writer:
            coming = [writer.add(one) for one in plain]
            writer.finish()
            private = _private(pages, [one.result() for one in coming], domain_xml)
            public = replace(
                PUBLIC, id=id_, name=name, parent=None, group=None, tags={},
                made_at=1735689600.0 + 3600 * self.made, memory=4096 * len(pages), disks=65536,
            )  # fmt: skip
            public = replace(public, **changes)  # type: ignore[arg-type]
            wrapped = None
            if data_key is not None:
                wrapped = wrapped_keys.wrap(data_key, id_, [one.key for one in ring.admins()])
            store.publish(id_, encode(public, private, keys), wrapped, writer=writer)
        return id_

    def packs(self, in_: str = "near") -> list[Path]:
        return sorted(
            (self.folder / in_ / "packs").glob("*/*"), key=lambda path: -path.stat().st_size
        )


def _private(pages: Sequence[int], digests: Sequence[bytes], domain_xml: str) -> Private:
    numbers = np.full(len(pages), ZERO, dtype=np.uint32)
    for place, at in enumerate(at for at, number in enumerate(pages) if number >= 0):
        numbers[at] = place // PER_CHUNK * SLOTS + place % PER_CHUNK
    last = len(digests) - 1
    facts: PrivateFacts = replace(
        FACTS, domain_xml=domain_xml, ram=(RamBlock(name="pc.ram", size=4096 * len(pages)),),
        disks=(DiskMake(target="vda", format="qcow2", size=65536, options="compat=1.1"),),
        stream=(Part(name="tail", size=len(STREAM), chunks=(last,)),),
    )  # fmt: skip
    disk = np.array([(last - 1) * SLOTS], dtype=np.uint32)
    ram = RegionMap(name="pc.ram", kind=Kind.RAM, size=Bytes(4096 * len(pages)), map=numbers)
    vda = RegionMap(name="vda", kind=Kind.DISK, size=Bytes(65536), map=disk)
    return Private(facts=facts, chunks=digests, regions=(ram, vda), files={"nvram": b"nvram"})


def flip(path: Path, at: int, bit: int = 1) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def stocked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    """Two empty stores and a keyring, in a folder."""
    for name in (
        "VMCKPT_IDENTITY", "VMCKPT_PASSPHRASE_FILE", "VMCKPT_READ_ONLY", "VMCKPT_INVENTORY", "TZ",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    # Whether things are on the disk in time is tried elsewhere.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("VMCKPT_STATE", str(folder / "state"))
    (folder / "hosts.yaml").write_text(
        "hosts: {alpha: {uri: 'test:///default'}}\n"
        f"stores: {{near: {folder}/near, far: {folder}/far}}\n"
    )
    for name in ("near", "far"):
        Store.create(LocalFolder(folder / name))
    return Stock(folder, capsys)


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def scheduled(stock: Stock) -> list[str]:
    """Four of one schedule, the first one pinned, and one by hand."""
    made = [stock.put(f"n{number}", [number], tags={"schedule": "nightly"}) for number in range(4)]
    stock.store().pin(made[0])
    stock.put("by hand", [9])
    return made
