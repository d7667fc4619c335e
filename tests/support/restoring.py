"""A restore right before its guest makes way: what hosts say, and what was done to them."""

import asyncio
from typing import Any, cast

import pytest

from tests.support.guest_xml import XML
from tests.support.restore_orders import ID
from tests.support.snapshots import FACTS, PUBLIC
from vmckpt.errors import GuestLocked
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal.recorder import Recorder
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.snapshot.request import RestoreRequest
from vmckpt.snapshot.restore import exclusivity
from vmckpt.snapshot.restore import restore as snapshot_restore_restore
from vmckpt.snapshot.restore.exclusivity import HostAnswer
from vmckpt.snapshot.restore.restore import Opened, _Plan, _Restoring
from vmckpt.store.format.private_part import Private


class Notes:
    """A journal's recorder, and what it was told."""

    holds = True
    id = None

    def __init__(self) -> None:
        self.steps: list[str] = []

    def check(self) -> None:
        pass

    def intend(self, step: str, _: object) -> int:
        self.steps.append(str(step))
        return len(self.steps)


PLAN = _Plan(guest="web1", uuid=PUBLIC.guest_uuid, xml=XML, images={"vda": "/s/web1.qcow2"})
ALPHA = Host(name="alpha", uri="qemu:///system")
ABOUT = {"made": {"vda": "1:1"}, "empty": []}
OPENED = Opened(
    store=StorePlace(name="near", url="/x"), public=PUBLIC,
    private=Private(facts=FACTS, chunks=[], regions=(), files={}), data_key=None,
    trusted=frozenset(),
)  # fmt: skip


class Side:
    """What the hosts say, and what was done to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard = [HostAnswer(host="alpha", users={})]
        self.runs = False
        self.ended: list[str] = []
        self.notes = Notes()

        async def ask(*_: object) -> list[HostAnswer]:
            return self.heard

        async def in_the_way(_: object, __: object, request: RestoreRequest) -> bool:
            if self.runs and not request.end_running:
                raise GuestLocked("web1 is running on alpha")
            return self.runs

        async def end(_: object, uuid: str) -> None:
            self.ended.append(uuid)

        monkeypatch.setattr(exclusivity, "query_hosts", ask)
        monkeypatch.setattr(snapshot_restore_restore, "_in_the_way", in_the_way)
        monkeypatch.setattr(domains, "end", end)

    def work(self, **wanted: Any) -> _Restoring:
        class Here:
            host = ALPHA

        caller = Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())
        request = RestoreRequest(snapshot=ID, **wanted)
        recorder = cast("Recorder", self.notes)
        return _Restoring(cast("Hypervisor", Here()), OPENED, request, caller, recorder)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    return Side(monkeypatch)
