"""Buffer a guest's output until its epoch is committed, with filters at each of its network cards.

A packet passes the counter, then `collecting`, `holding` and the sink. The output of an epoch is
buffered in `holding`. At the end of the epoch, while the guest is paused, `collecting` is switched
on and keeps all later output. This takes only one command to QEMU, to keep the pause short. When
the backup has the epoch, `holding` is emptied to the network, then `collecting` into `holding`.

QEMU empties a buffer by itself after 71.6 minutes of the guest's time. `keep` replaces each buffer
long before that. If no vmckpt process is left to replace buffers, the sink discards packets that
QEMU's timer releases: the sink is open only during a release by vmckpt.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.replication.disks.epoch_log import punch
from vmckpt.replication.primary import network_filters, new_nics
from vmckpt.replication.primary.network_filters import LONGEST, Filter, Kind
from vmckpt.replication.primary.new_nics import Commands, NewCards
from vmckpt.units import Seconds

log = logging.getLogger("vmckpt.replica")

MOST = 10_000
"""QEMU silently drops packets beyond this number in one buffer (net/queue.c)."""
EARLY = 5_000
"""An epoch ends early once this many packets are waiting: more arrive until the guest is paused."""
_REDIRECTOR = "filter-redirector"
_NEEDED = (Kind.HOLDING, Kind.COLLECTING, Kind.COUNT)
# Sizes in a filter-dump file: the file header; for each packet, a header and one byte of data.
_FILE_HEAD, _RECORD = 24, 17
_LARGE = 1 << 20


class Buffers:
    """The output buffers of one guest's network cards."""

    def __init__(
        self, monitor: Commands, cards: Sequence[str], folder: Path, owner: tuple[int, int], *,
        interval: Seconds = LONGEST, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`cards`: libvirt's aliases; `folder`: directory on tmpfs for QEMU's packet count files;
        `owner`: user and group IDs of QEMU; `interval`: time after which QEMU empties a buffer by
        itself.
        """
        self._monitor, self._cards, self._owner = monitor, tuple(cards), owner
        self._interval, self._clock = interval, clock
        self._files = {card: folder / f"count-{card}" for card in cards}
        self._sizes = dict.fromkeys(self._cards, _FILE_HEAD)
        self._closed = dict(self._sizes)
        self._now: dict[tuple[Kind, str], Filter] = {}
        """The current filter of each kind on each network card."""
        self._armed = {Kind.HOLDING: 0.0, Kind.COLLECTING: 0.0}
        """Earliest possible start of the interval of the current buffers in QEMU, by kind."""
        self._waits = False
        """A closed epoch is not released yet, and the open epoch is in `collecting`."""
        self._mixed = False
        """Output of the open epoch may already be in `holding`, which must then not be released."""
        self._held = dict.fromkeys(self._cards, 0)
        """Number of packets, for each card, of epochs that are closed and not released yet."""
        self.lost = 0
        """Total number of packets that QEMU dropped because an epoch or a buffer already had MOST
        packets.
        """
        self._there = False
        self.new_cards = NewCards(monitor, folder)
        """Network cards plugged in while output was being buffered."""

    def add(self) -> None:
        """Add the filters: from then on, all output is buffered.

        Raises HypervisorError, OSError.
        """
        self._arm(Kind.HOLDING, Kind.COLLECTING)
        self._now, discards = {}, _can_discard(self._monitor)
        for card in self._cards:
            file = os.open(self._files[card], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.fchown(file, *self._owner)
            finally:
                os.close(file)
            self._sizes[card] = self._closed[card] = _FILE_HEAD
            if discards:
                self._add_sink(card)
            self._add_buffer(Filter(Kind.HOLDING, card), on=True)
            self._add_buffer(Filter(Kind.COLLECTING, card), on=False)
            told = {"qom-type": "filter-dump", "file": str(self._files[card]), "maxlen": 1}
            self._add(Filter(Kind.COUNT, card), told)
        self._waits, self._mixed, self._there = False, False, True
        self.new_cards.hold()

    def attach(self) -> None:
        """Continue with the filters of an earlier agent; all buffered output becomes one epoch.

        The earlier agent may have died during a release, or while it was replacing a buffer. The
        filters of an unplugged card are gone. Raises HypervisorError, OSError.
        """
        there = _found(self._monitor)
        self._now = network_filters.last(there)
        self._switch(Kind.SINK, on=True)
        for one in there:
            if self._now[one.kind, one.card] != one:
                self._delete(one)  # QEMU empties the filter into its replacement
        self._switch(Kind.HOLDING, on=True)
        self._waits, self._there = True, True
        self._replace(Kind.HOLDING)
        self._replace(Kind.COLLECTING)
        for card in self._cards:
            self._closed[card] = self._size(card)
        self.new_cards.hold()

    def complete(self) -> bool:
        """Return whether all necessary filters exist. The filters of an unplugged card do not.

        Raises HypervisorError.
        """
        return there(self._monitor, self._cards)

    def collected(self) -> int:
        """Return the number of packets in the open epoch at the card that has the most.

        Raises OSError.
        """
        return max((self._count(card) for card in self._cards), default=0)

    def close_epoch(self) -> int:
        """Close the open epoch, with the guest paused, and buffer later output separately.

        Returns the number of packets at the card that has the most; packets beyond MOST are lost.
        Raises HypervisorError, OSError.
        """
        counts = {card: self._count(card) for card in self._cards}
        if self._waits:
            self._switch(Kind.COLLECTING, on=False)
        self._arm(Kind.COLLECTING)
        self._switch(Kind.COLLECTING, on=True)
        self._waits, self._mixed = True, False
        for card in self._cards:
            self._close(card, counts[card])
            if self._files[card].stat().st_blocks * 512 > _LARGE:
                self._forget(card)
        return max(counts.values(), default=0)

    def _close(self, card: str, count: int) -> None:
        """Count `count` packets of a card as held if the buffer had room, otherwise as lost."""
        kept = min(count, MOST, MOST - self._held[card])
        self._held[card] += kept
        self.lost += count - kept
        self._closed[card] = self._size(card)

    def _forget(self, card: str) -> None:
        """Free the space of the count file. Its size stays valid, since QEMU keeps appending."""
        file = os.open(self._files[card], os.O_WRONLY)
        try:
            punch(file, 0, self._closed[card])
        finally:
            os.close(file)

    def release(self) -> None:
        """Release the output of the closed epoch in order. Raises HypervisorError.

        If QEMU's timer may have added output of the open epoch, nothing is released until the next
        epoch is closed.
        """
        self._see_timer()
        if self._mixed:
            return
        self._arm(Kind.HOLDING)
        self._switch(Kind.SINK, on=False)
        self._switch(Kind.HOLDING, on=False)
        self._switch(Kind.HOLDING, on=True)
        self._switch(Kind.SINK, on=True)
        self._switch(Kind.COLLECTING, on=False)
        self._waits = False
        self._held = dict.fromkeys(self._cards, 0)

    def keep(self) -> None:
        """Prevent QEMU's timer from releasing output. Call this regularly, as in a loop.

        Raises HypervisorError.
        """
        if not self._there:
            return
        self._see_timer()
        for kind in (Kind.HOLDING, Kind.COLLECTING):
            needed = kind is Kind.HOLDING or self._waits  # otherwise the buffer is off and empty
            if needed and network_filters.due(self._armed[kind], self._clock(), self._interval):
                self._replace(kind)

    def _see_timer(self) -> None:
        armed, now = self._armed[Kind.COLLECTING], self._clock()
        if self._waits and network_filters.may_have_fired(armed, now, self._interval):
            self._mixed = True

    def _arm(self, *kinds: Kind) -> None:
        """Record the current time as the earliest start of these buffers' intervals in QEMU."""
        self._armed |= dict.fromkeys(kinds, self._clock())

    def _replace(self, kind: Kind) -> None:
        """Replace the buffers of a kind, which restarts their interval. Releases no output."""
        self._arm(kind)
        for card in self._cards:
            old = self._now.get((kind, card))
            try:
                if old is not None:
                    self._add_buffer(old.next, on=True, before=old)
                    self._delete(old)
            except QmpRefused as exc:  # the card was unplugged, which `complete` reports
                log.warning("the output of %s cannot be buffered any longer: %s", card, exc)

    def hold_any_of(self, cards: Collection[str]) -> bool:
        """Return whether any of these cards has filters. Raises HypervisorError."""
        return any(one.card in cards for one in _found(self._monitor))

    def remove(self, gone: Collection[str] = ()) -> None:
        """Release all output in order, and remove the filters. Raises HypervisorError, OSError.

        The output of `gone` cards is discarded: QEMU has freed those cards, and would crash if
        their packets were released.
        """
        _remove(self._monitor, gone)
        for card, file in self._files.items():
            if self._there:
                self._close(card, self._count(card))
            file.unlink(missing_ok=True)
        self._there = False
        self._held = dict.fromkeys(self._cards, 0)
        self.new_cards.connect()

    def _add_buffer(self, one: Filter, *, on: bool, before: Filter | None = None) -> None:
        """Add a buffer that packets pass right after `before`; None: before all other filters.

        `on`: whether it buffers now.
        """
        what: dict[str, object] = {
            "qom-type": "filter-buffer", "interval": round(self._interval * 1e6),
            "status": "on" if on else "off",
        }  # fmt: skip
        if before is not None:
            what |= {"position": f"id={before.name}", "insert": "before"}
        self._add(one, what)

    def _add_sink(self, card: str) -> None:
        one = Filter(Kind.SINK, card)
        null = {"type": "null", "data": {}}
        with suppress(QmpRefused):  # it exists if an earlier agent has died
            self._monitor.tell("chardev-add", {"id": one.name, "backend": null})
        what: dict[str, object] = {"qom-type": _REDIRECTOR, "outdev": one.name, "status": "on"}
        self._add(one, what)

    def _add(self, one: Filter, what: dict[str, object]) -> None:
        told = {**what, "id": one.name, "netdev": f"host{one.card}", "queue": "rx"}
        self._monitor.tell("object-add", told)
        self._now[one.kind, one.card] = one

    def _delete(self, one: Filter) -> None:
        self._monitor.tell("object-del", {"id": one.name})

    def _switch(self, kind: Kind, *, on: bool) -> None:
        for card in self._cards:
            if (one := self._now.get((kind, card))) is not None:
                self._set(one, on=on)

    def _set(self, one: Filter, *, on: bool) -> None:
        path, value = f"/objects/{one.name}", "on" if on else "off"
        told: dict[str, object] = {"path": path, "property": "status", "value": value}
        self._monitor.tell("qom-set", told)

    def _count(self, card: str) -> int:
        return (self._size(card) - self._closed[card]) // _RECORD

    def _size(self, card: str) -> int:
        with suppress(FileNotFoundError):  # the file was removed with the filters
            self._sizes[card] = max(self._sizes[card], self._files[card].stat().st_size)
        return self._sizes[card]


def remove(monitor: Commands, folder: Path) -> None:
    """Remove all filters that exist, release their output, and bring up the links of new cards.

    Raises HypervisorError, OSError.
    """
    _remove(monitor)
    new_nics.connect(monitor, folder)


def _remove(monitor: Commands, gone: Collection[str] = ()) -> None:
    failed = None
    for one in _found(monitor, gone):
        try:
            monitor.tell("object-del", {"id": one.name})
        except HypervisorError as exc:
            if "not found" not in exc.message:
                failed = exc
    for one in network_filters.found(device["label"] for device in monitor.ask("query-chardev")):
        with suppress(QmpRefused):
            monitor.tell("chardev-remove", {"id": one.name})
    if failed is not None:
        raise failed


def there(monitor: Commands, cards: Sequence[str]) -> bool:
    """Return whether all cards have all necessary filters. Raises HypervisorError."""
    told = network_filters.last(_found(monitor))
    return all((kind, card) in told for card in cards for kind in _NEEDED)


def _found(monitor: Commands, gone: Collection[str] = ()) -> list[Filter]:
    return network_filters.found(
        (one["name"] for one in monitor.ask("qom-list", path="/objects")), gone
    )


def _can_discard(monitor: Commands) -> bool:
    """Return whether this QEMU was built with the filter that sinks need."""
    told = monitor.ask("qom-list-types", implements="netfilter")
    return any(one["name"] == _REDIRECTOR for one in told)
