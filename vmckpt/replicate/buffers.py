"""A guest's output waits for the commit of its epoch: two `filter-buffer` objects at each card.

A packet is first seen by the object that was added last: the counter, then `collecting`, then
`holding`. What an epoch sends waits in `holding`. At its end, guest stopped, `collecting` is
switched on and keeps all that comes after; that is one order to QEMU, for the guest waits for it.
When the backup has the epoch, `holding` empties itself into the network, then `collecting` into
`holding`. QEMU's own timer would let all out after 71 minutes; each turn sets it anew.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from vmckpt.checkpoint.settings import Commands
from vmckpt.errors import HypervisorError
from vmckpt.replicate.diskepochs import punch

MOST = 10_000
"""QEMU drops what is beyond so many packets in one buffer, and tells nobody (net/queue.c)."""
EARLY = 5_000
"""An epoch ends when so many wait: more come until the guest stands still."""
_LONGEST = 2**32 - 1
_HOLDING, _COLLECTING, _COUNT = "vmckpt-holding-", "vmckpt-collecting-", "vmckpt-count-"
# What filter-dump writes: a head of the file, then for each packet a head and one byte of it.
_FILE_HEAD, _RECORD = 24, 17
_LARGE = 1 << 20


class Buffers:
    """Those of one guest's cards."""

    def __init__(
        self, monitor: Commands, cards: Sequence[str], folder: Path, owner: tuple[int, int]
    ) -> None:
        """`folder`: on tmpfs, where QEMU, which runs as `owner`, counts packets."""
        self._monitor, self._cards, self._owner = monitor, tuple(cards), owner
        self._files = {card: folder / f"count-{card}" for card in cards}
        self._sizes = dict.fromkeys(self._cards, _FILE_HEAD)
        self._closed = dict(self._sizes)
        self._waits = False
        """A closed epoch has not been released, and the open one is in `collecting`."""
        self._held = dict.fromkeys(self._cards, 0)
        """Packets of epochs that are closed and not released."""
        self.lost = 0
        """Packets that QEMU dropped, in all: beyond MOST in an epoch, or in what is held."""
        self._there = False

    def add(self) -> None:
        """From now on nothing gets out by itself. Raises HypervisorError."""
        for card in self._cards:
            file = os.open(self._files[card], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.fchown(file, *self._owner)
            finally:
                os.close(file)
            self._sizes[card] = self._closed[card] = _FILE_HEAD
            for mark, status in ((_HOLDING, "on"), (_COLLECTING, "off")):
                what = {"qom-type": "filter-buffer", "interval": _LONGEST, "status": status}
                self._add(mark, card, what)
            told = {"qom-type": "filter-dump", "file": str(self._files[card]), "maxlen": 1}
            self._add(_COUNT, card, told)
        self._waits, self._there = False, True

    def attach(self) -> None:
        """Go on with those that an agent before us has added: all that waits is of one epoch.

        It may have died in the middle of a release. Raises HypervisorError.
        """
        self._switch(_HOLDING, "on")
        self._waits = True
        for card, file in self._files.items():
            self._sizes[card] = self._closed[card] = max(_FILE_HEAD, file.stat().st_size)
        self._there = True

    def _add(self, mark: str, card: str, what: dict[str, object]) -> None:
        told = {**what, "id": mark + card, "netdev": f"host{card}", "queue": "rx"}
        self._monitor.tell("object-add", told)

    def complete(self) -> bool:
        """Whether all are in their place; those of a card that is unplugged go with it. Raises
        HypervisorError."""
        return there(self._monitor, self._cards)

    def collected(self) -> int:
        """Packets in the open epoch, at the card with the most."""
        return max((self._count(card) for card in self._cards), default=0)

    def close_epoch(self) -> int:
        """With the guest stopped: the epoch has no more output; how many packets at the card with
        the most. Those that are too many are lost. Raises HypervisorError."""
        counts = {card: self._count(card) for card in self._cards}
        if self._waits:
            self._switch(_COLLECTING, "off")
        self._switch(_COLLECTING, "on")
        self._waits = True
        for card in self._cards:
            self._close(card, counts[card])
            if self._files[card].stat().st_blocks * 512 > _LARGE:
                self._forget(card)
        return max(counts.values(), default=0)

    def _close(self, card: str, count: int) -> None:
        """What was collected has gone on, as far as there was room for it."""
        kept = min(count, MOST, MOST - self._held[card])
        self._held[card] += kept
        self.lost += count - kept
        self._closed[card] = self._size(card)

    def _forget(self, card: str) -> None:
        """Give back what was counted; QEMU goes on where it is, so the size still counts."""
        file = os.open(self._files[card], os.O_WRONLY)
        try:
            punch(file, 0, self._closed[card])
        finally:
            os.close(file)

    def release(self) -> None:
        """The epoch is safe: what is held goes out, in its order. Raises HypervisorError."""
        self._switch(_HOLDING, "off")
        self._switch(_HOLDING, "on")
        self._switch(_COLLECTING, "off")
        self._waits = False
        self._held = dict.fromkeys(self._cards, 0)

    def remove(self) -> None:
        """Let all out, in its order, and take the filters away. Raises HypervisorError."""
        remove(self._monitor, self._cards)
        for card, file in self._files.items():
            if self._there:
                self._close(card, self._count(card))
            file.unlink(missing_ok=True)
        self._there = False
        self._held = dict.fromkeys(self._cards, 0)

    def _switch(self, mark: str, status: str) -> None:
        for card in self._cards:
            where = f"/objects/{mark}{card}"
            self._monitor.tell("qom-set", {"path": where, "property": "status", "value": status})

    def _count(self, card: str) -> int:
        return (self._size(card) - self._closed[card]) // _RECORD

    def _size(self, card: str) -> int:
        self._sizes[card] = max(self._sizes[card], self._files[card].stat().st_size)
        return self._sizes[card]


def remove(monitor: Commands, cards: Sequence[str]) -> None:
    """Take away what of the filters is there; what they hold goes out. Raises HypervisorError."""
    failed = None
    for card in cards:
        for mark in (_COUNT, _COLLECTING, _HOLDING):
            try:
                monitor.tell("object-del", {"id": mark + card})
            except HypervisorError as exc:
                if "not found" not in exc.message:
                    failed = exc
    if failed is not None:
        raise failed


def there(monitor: Commands, cards: Sequence[str]) -> bool:
    """Whether all filters of all cards are in their place. Raises HypervisorError."""
    told = {one["name"] for one in monitor.ask("qom-list", path="/objects")}
    marks = (_HOLDING, _COLLECTING, _COUNT)
    return all(mark + card in told for card in cards for mark in marks)
