"""Bringing a snapshot back to life on this host: its disks, then its memory."""

import shutil
import time
from pathlib import Path
from typing import Any

from vmckpt.agent import spool
from vmckpt.agent.images import Images
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.revive import Revival
from vmckpt.agent.talk import Talk
from vmckpt.checkpoint.savefile import Fifo
from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import monitor
from vmckpt.hypervisor.monitor import Monitor
from vmckpt.store import manifest
from vmckpt.store.places import backend_of
from vmckpt.store.store import Store
from vmckpt.units import Seconds


def restore(order: RestoreOrder, talk: Talk) -> dict[str, Any]:
    """Write the disks, then start the guest. Raises VmckptError, and nothing is left then.

    The new images are whole before one that is there is put aside, and what was put aside comes
    back if the guest does not start.
    """
    began = time.monotonic()
    store = Store.open(backend_of(order.store.url), cache=Path(order.state) / "cache")
    trusted = frozenset(bytes.fromhex(one) for one in order.trusted)
    found = manifest.decode(store.manifest(order.snapshot), order.snapshot, trusted)
    key = None if order.data_key is None else bytes.fromhex(order.data_key)
    private, sealing = found.opened(key)
    missing = {one.target for one in private.facts.disks} - set(order.images)
    if missing:
        raise BadInput(f"nobody said where disk {min(missing)} is to be")
    with spool.held(order.folder, patience=Seconds(0.0)), store.reader(sealing) as reader:
        order.folder.mkdir(mode=0o700)
        try:
            with Images(order, private, reader, talk) as images:
                images.write()
                written = time.monotonic()
                # The guest that is there ends only now: if a disk cannot be written, it runs on.
                talk.ask("make way")
                images.swap()
                if order.xml is not None:
                    revival = Revival(order.xml, private, reader, talk)
                    _start(order, order.xml, revival)
                images.keep()
        finally:
            shutil.rmtree(order.folder, ignore_errors=True)
    ended = time.monotonic()
    return {"disks": written - began, "memory": ended - written, "took": ended - began}


def _start(order: RestoreOrder, xml: str, revival: Revival) -> None:
    """Start the guest from its memory. One whose links are to be down stands still until they are:
    with the state of a card QEMU loads that its link was up, whatever libvirt had set."""
    paused = order.paused or order.links_down
    with Fifo(order.folder, revival.fill) as path:
        monitor.restore(str(path), xml, paused=paused, host=order.host, uri=order.uri)
    if not order.links_down:
        return
    with Monitor(order.guest, host=order.host, uri=order.uri) as there:
        try:
            for card in there.cards():
                there.tell("set_link", {"name": card, "up": False})
        except HypervisorError:
            there.end()
            raise
        if not order.paused:
            there.resume()
