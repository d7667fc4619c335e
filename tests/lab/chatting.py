"""Three lab guests that send each other numbered messages, and what their snapshots say of it."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tests.lab.bench import Bench, until
from vmckpt.app import snapshots
from vmckpt.app.controller import Controller
from vmckpt.capture import network_hold_undo_process
from vmckpt.model.events import Caller
from vmckpt.model.recovery import Phase
from vmckpt.snapshot.group import create
from vmckpt.snapshot.group.barrier import Cutting
from vmckpt.snapshot.group.create import GroupTaken
from vmckpt.snapshot.request import TakeRequest
from vmckpt.store.assemble import Assembly
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.format.chunk_map import UNIT, Kind
from vmckpt.store.format.manifest import decode
from vmckpt.store.repository import Store
from vmckpt_lab import guest_chat
from vmckpt_lab.guest_chat import Chat

PLACES = {"web1": "alpha", "web2": "beta", "db1": "alpha"}
"""The guests, and where they run."""
GROUP = ",".join(PLACES)
SMALL = {"memory": "192MiB", "dirty": "8MiB@1MiB/s", "disk": "16MiB"}


def started(bench: Bench) -> None:
    """Start them, and wait until all can hear all."""
    for name, on in PLACES.items():
        bench.guest(name, on, chat=len(PLACES), **SMALL)
        # So that the next one has the machine for itself while it boots.
        bench.inside(on, "virsh", "suspend", name)
    for name, on in PLACES.items():
        bench.inside(on, "virsh", "resume", name)
    heard = {name: bench.seen(name).heard for name in PLACES}
    until(lambda: all(bench.seen(name).heard > heard[name] + 50 for name in PLACES))


@dataclass
class Archive:
    """Reads what the guests had sent and received out of their snapshots' memory."""

    bench: Bench
    _pages: dict[str, int] = field(default_factory=dict)
    """Where each guest keeps it: it stays there as long as the guest runs."""

    def chats(self, ids: Sequence[str]) -> list[Chat]:
        return [self._chat(id_) for id_ in ids]

    def _chat(self, id_: str) -> Chat:
        store = Store.open(backend_of(str(self.bench.plan.shared / "snapshots")))
        found = decode(store.manifest(id_), id_, None)
        private, sealing = found.opened(None)
        region = next(one for one in private.regions if one.name == "pc.ram")
        with store.reader(sealing) as reader:
            memory = Assembly(region.kind, region.size, region.map, private.chunks, reader)
            guest = found.public.guest
            if guest in self._pages:
                told = guest_chat.parse(memory.read(self._pages[guest], 1))
                if told is not None:
                    return told
            self._pages[guest] = _search(memory)
            told = guest_chat.parse(memory.read(self._pages[guest], 1))
            assert told is not None
            return told


def _search(memory: Assembly) -> int:
    """The one page that begins with the mark."""
    unit = int(UNIT[Kind.RAM])
    mark = np.frombuffer(guest_chat.MARK, dtype=np.uint8)
    found: list[int] = []
    for piece in memory.pieces():
        if piece.data is not None:
            pages = np.frombuffer(piece.data, dtype=np.uint8).reshape(-1, unit)
            hits = (pages[:, : len(mark)] == mark).all(axis=1)
            found += (piece.start + np.flatnonzero(hits)).tolist()
    assert len(found) == 1, f"{len(found)} pages begin with the mark"
    return found[0]


Blow = Callable[[str, Phase], None]
"""What is done when a member ("web2 on beta") has come to a phase, before anybody hears of it."""


class Struck(Cutting):
    """A cut to which something happens."""

    blow: ClassVar[Blow]

    async def reached(self, member: str, phase: Phase) -> None:
        Struck.blow(member, phase)
        await super().reached(member, phase)


def taken(bench: Bench, patch: pytest.MonkeyPatch, blow: Blow, stop: asyncio.Event) -> GroupTaken:
    """The same as `vmckpt snapshot create --group`, in this process. Raises VmckptError."""
    patch.setenv("VMCKPT_STATE", bench.environment["VMCKPT_STATE"])
    patch.setattr(create, "Cutting", Struck)
    patch.setattr(Struck, "blow", staticmethod(blow), raising=False)
    caller = Caller(emit=lambda _: None, warn=lambda _: None, stop=stop)
    acting = Controller(inventory=bench.inventory, caller=caller)
    return asyncio.run(snapshots.take_group(acting, None, list(PLACES), TakeRequest(guest="")))


def agent_of(bench: Bench, guest: str) -> int:
    """The agent that holds a guest's output, by the undo process beside it."""
    uuid = bench.inside(PLACES[guest], "virsh", "domuuid", guest).strip()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace")
            if network_hold_undo_process.__name__ in words and uuid in words:
                status = (path.parent / "status").read_text()
                return int(status.partition("PPid:")[2].split()[0])
    raise AssertionError(f"no agent holds the output of {guest}")


def held(bench: Bench, guest: str) -> list[str]:
    """The filters that hold a guest's output."""
    order = '{"execute": "qom-list", "arguments": {"path": "/objects"}}'
    told = bench.inside(PLACES[guest], "virsh", "qemu-monitor-command", guest, order)
    return [one["name"] for one in json.loads(told)["return"] if "hold" in one["name"]]


def free(bench: Bench) -> bool:
    """Whether all run, and nothing that they send is held."""
    return all(
        held(bench, guest) == []
        and bench.inside(on, "virsh", "domstate", guest).strip() == "running"
        for guest, on in PLACES.items()
    )
