"""Disks of a QEMU that has no guest."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.guestless import Qmp, qemu
from vmckpt.replication.disks.mirror_job import MARK
from vmckpt.units import MIB


@contextmanager
def with_disks(folder: Path, *names: str) -> Iterator[Qmp]:
    """A QEMU with a file of 2 MiB for each disk, of which the first half is full of its name."""
    words = []
    for name in names:
        (folder / name).write_bytes(name.encode() * MIB + bytes(MIB))
        words += ["-blockdev", f"driver=file,node-name={name},filename={folder / name}"]
    with qemu(*words) as made:
        yield made


def mirrors_left(qmp: Qmp) -> tuple[str, ...]:
    """The names of our mirrors, or of halves of them, that a QEMU has."""
    names = [str(job["device"]) for job in qmp.ask("query-block-jobs")]
    names += [str(node["node-name"]) for node in qmp.ask("query-named-block-nodes", flat=True)]
    found = {name for name in names if name.startswith(MARK)}
    return tuple(sorted(name for name in found if not name.endswith("-top")))
