"""Finish or undo a restore whose agent died."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vmckpt.agent.orders import UnrestoreOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.restore import lazy, lazy_server, leftovers, replace_file
from vmckpt.agent.restore.leftovers import GuestFacts, ImageFacts, LeftoverDecision, Spot
from vmckpt.agent.snapshot import spool
from vmckpt.errors import GuestLocked, HypervisorError, QemuUnclear
from vmckpt.hypervisor import connection
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.units import Seconds

_PATIENCE = Seconds(30.0)
_TURN = Seconds(0.5)


def unrestore(order: UnrestoreOrder, _: ControllerChannel | None = None) -> dict[str, Any]:
    """Finish or undo a restore; may be repeated. Raises VmckptError, OSError.

    Returns JSON: "verdict" is the decision; "why" the reason if it is unclear; "did" the actions
    taken, or with `dry` the planned ones; "left" the files that remain next to the images.
    """
    with spool.held(order.folder, patience=Seconds(0.0) if order.dry else _PATIENCE):
        verdict, why = _verdict(order)
        did = []
        for what, path, target in list(_deeds(order, verdict)):
            did.append(what)
            if not order.dry:
                _carry_out(path, target)
        if not order.dry:
            shutil.rmtree(order.folder, ignore_errors=True)
    return {"verdict": str(verdict), "why": why, "did": sorted(set(did)), "left": _left(order)}


def _verdict(order: UnrestoreOrder) -> tuple[LeftoverDecision, str]:
    if order.made is None:
        # The restore never got permission to replace images, so a running guest uses the old ones.
        return LeftoverDecision.BACK, ""
    seen = [_seen(order, name) for name in order.made]
    return leftovers.decide(seen, _seat(order), memory=order.memory)


def _seen(order: UnrestoreOrder, name: str) -> ImageFacts:
    assert order.made is not None
    place = Path(order.images[name])
    there = replace_file.mark(place) if replace_file.is_there(place) else None
    return ImageFacts(
        spot=leftovers.spot(there, order.made[name]),
        aside=replace_file.is_there(replace_file.paths(place, order.snapshot)[1]),
        empty=name in order.empty,
    )


def _deeds(
    order: UnrestoreOrder, verdict: LeftoverDecision
) -> Iterator[tuple[str, Path, Path | None]]:
    """Yield each action: its description, the file, and the file's new path; None: remove it."""
    if verdict is LeftoverDecision.UNCLEAR:
        return
    for name, path in order.images.items():
        place = Path(path)
        new, old = replace_file.paths(place, order.snapshot)
        if verdict is LeftoverDecision.ARRIVED and replace_file.is_there(old):
            yield "remove the previous images", old, None
        elif order.made is not None and verdict is LeftoverDecision.BACK:
            # Small files have no mark, as QEMU's helpers rewrite them. They are treated like the
            # disks.
            ours = name not in order.made or _seen(order, name).spot is Spot.NEW
            if replace_file.is_there(old):
                yield "move the previous images back", old, place
            elif name in order.empty and ours and replace_file.is_there(place):
                yield "remove the restored images", place, None
        if replace_file.is_there(new):
            yield "remove unused images", new, None


def _carry_out(path: Path, target: Path | None) -> None:
    if target is None:
        replace_file.remove(path)
    else:
        replace_file.rename(path, target)


def _left(order: UnrestoreOrder) -> list[str]:
    """Return the temporary files that remain next to the images."""
    return [
        str(one)
        for path in order.images.values()
        for one in replace_file.paths(Path(path), order.snapshot)
        if replace_file.is_there(one)
    ]


def _seat(order: UnrestoreOrder) -> GuestFacts:
    if lazy_server.waits_for_memory(order.guest):
        if order.dry:  # libvirt would not answer
            return GuestFacts(runs=_revived(order.guest), revived=True)
        lazy.serve_again(order.guest, order.host)
    give_up = time.monotonic() + (Seconds(0.0) if order.dry else _PATIENCE)
    while True:
        try:
            with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
                state = monitor.run_state()
                if state in ("shutdown", "internal-error"):
                    return GuestFacts(runs=False, revived=False)
                if state != "inmigrate":
                    return GuestFacts(runs=True, revived=_revived(order.guest))
        except HypervisorError as exc:
            if exc.code in connection.NOT_HERE:
                return GuestFacts(runs=False, revived=False)
            raise
        if time.monotonic() > give_up:
            raise GuestLocked(
                f"{order.host}: libvirt is still loading the guest's memory",
                hint="run vmckpt recover again in a minute",
            )
        time.sleep(_TURN)


def _revived(guest: str) -> bool:
    """Return whether the guest was started from saved memory; False if this is unknown."""
    try:
        process = identity.hold(guest)
        if process is None:
            return False
        with process:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, QemuUnclear):
        return False
    return b"-incoming" in words
