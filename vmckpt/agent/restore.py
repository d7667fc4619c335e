"""Bringing a snapshot back to life on this host: its disks, then its memory."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from vmckpt.agent import chains, lining, spool, starting
from vmckpt.agent.images import Images
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.revive import Revival
from vmckpt.agent.small_files import SmallFiles
from vmckpt.agent.talk import Talk
from vmckpt.errors import BadInput, HypervisorError, OutcomeUnknown, VmckptError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.qmp import Monitor
from vmckpt.store import repository, tiered_reader
from vmckpt.store.assemble import Source
from vmckpt.store.format import manifest
from vmckpt.store.format.private_part import Private
from vmckpt.store.repository import Store
from vmckpt.store.tiered_reader import TieredReader
from vmckpt.units import Seconds


class Way(Protocol):
    """How disks come to the guest."""

    def images(self, order: RestoreOrder, private: Private, reader: Source, talk: Talk) -> Images:
        """What makes them. Raises BadInput if that cannot be done with these."""

    def started_as(self, xml: str) -> str:
        """What the guest is started with."""


class _Written:
    """They are whole before it starts."""

    def images(self, order: RestoreOrder, private: Private, reader: Source, talk: Talk) -> Images:
        return Images(order, private, reader, talk)

    def started_as(self, xml: str) -> str:
        return xml


@contextmanager
def opened(order: RestoreOrder) -> Iterator[tuple[Store, Private, TieredReader]]:
    """The snapshot that an order names, and who reads it. Raises StoreError, BadInput."""
    cache = Path(order.state) / "cache"
    store = repository.opened(order.store, cache=cache)
    trusted = frozenset(bytes.fromhex(one) for one in order.trusted)
    found = manifest.decode(store.manifest(order.snapshot), order.snapshot, trusted)
    key = None if order.data_key is None else bytes.fromhex(order.data_key)
    private, sealing = found.opened(key)
    missing = {one.target for one in private.facts.disks} - set(order.images)
    if missing:
        raise BadInput(f"nobody said where disk {min(missing)} is to be")
    tiers = [store, *tiered_reader.others(order.others, cache)]
    with TieredReader(tiers, sealing) as reader:
        yield store, private, reader


def restore(order: RestoreOrder, talk: Talk, way: Way | None = None) -> dict[str, Any]:
    """Write the disks, then start the guest. Raises VmckptError, and nothing is left then.

    The new images are whole before one that is there is put aside, and what was put aside comes
    back if the guest does not start. Raises OutcomeUnknown if nobody knows whether it has: then all
    images stay where they are, for recovery.
    """
    began = time.monotonic()
    way = way or _Written()
    with (
        opened(order) as (store, private, reader),
        spool.held(order.folder, patience=Seconds(0.0)),
    ):
        shutil.rmtree(order.folder, ignore_errors=True)  # of one that was killed
        order.folder.mkdir(mode=0o700)
        try:
            files = SmallFiles(private.files, order.images, order.snapshot, replace=order.replace)
            with way.images(order, private, reader, talk) as images, files:
                chains.check(map(Path, order.images.values()), order.users)
                images.write()
                files.write()
                written = time.monotonic()
                # The guest that is there ends only now: if a disk cannot be written, it runs on.
                # Of a group nobody ends before all are ready; who asks again is still there.
                talk.ask("ready")
                talk.ask("make way", made=images.marks(), empty=_empty(order))
                images.swap()
                files.swap()
                try:
                    if order.xml is not None:
                        xml = way.started_as(order.xml)
                        starting.start(order, xml, Revival(xml, private, reader, talk))
                except OutcomeUnknown:
                    images.leave()
                    files.leave()
                    raise
                images.keep()
                files.keep()
            if order.follows:
                with suppress(OSError):  # the next one is as good, and tells another parent
                    lining.went_back(order.state, order.guest, order.snapshot)
            # Whatever becomes of who asks: from here the guest is back.
            ended = time.monotonic()
            warnings = [] if order.xml is None else list(_follow(order, talk))
            warnings += tiered_reader.warnings(reader, store)
        finally:
            shutil.rmtree(order.folder, ignore_errors=True)
    return {
        "disks": written - began,
        "memory": ended - written,
        "took": ended - began,
        "warnings": warnings,
    }


def _empty(order: RestoreOrder) -> list[str]:
    """Where nothing is that could be put aside, by name."""
    return [name for name, path in order.images.items() if not Path(path).exists()]


def _follow(order: RestoreOrder, talk: Talk) -> Iterator[str]:
    """Let the controller do what must follow outside, and then let the guest be heard; warnings."""
    try:
        told = talk.ask("started")
        if order.links_down and isinstance(told, dict) and told.get("links_up"):
            with Monitor(order.guest, host=order.host, uri=order.uri) as there:
                domains.up(there)
    except HypervisorError as exc:
        yield f"its links are still down: {exc}"
    except VmckptError:
        pass  # nobody is there any more, or knows nothing that would follow
