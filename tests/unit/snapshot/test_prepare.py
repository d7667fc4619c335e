"""What a guest lacks, what is written into its definition, and what recovery says of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest

from tests.support.builders import GUEST, HOST
from vmckpt.errors import BadInput, GuestLocked
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.domains import Definition
from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import OrphanedJob
from vmckpt.journal.store import Journal
from vmckpt.model.guest import Guest, GuestJob
from vmckpt.model.migration import Outcome
from vmckpt.snapshot import prepare
from vmckpt.snapshot.prepare import Readiness

BARE = "<domain type='kvm'><name>web1</name><uuid>0d3f</uuid><devices/></domain>"
CALLER = cast("Any", type("Caller", (), {"warn": print})())


class Libvirt:
    """A host's: what it has stored of a guest, and what runs."""

    def __init__(self) -> None:
        self.guest: Guest | None = GUEST
        self.stored = BARE
        self.running: str | None = None
        self.written: list[str] = []

    async def find_guest(self, *_: object) -> Guest | None:
        return self.guest

    async def stored_definition(self, *_: object) -> Definition:
        live = None if self.running is None else ET.fromstring(self.running)
        return Definition(text=self.stored, running=live, disks=())

    async def write(self, _: object, __: str, xml: str, *, instead_of: str) -> None:
        assert instead_of == self.stored
        self.stored = xml
        self.written.append(xml)


@pytest.fixture
def libvirt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Libvirt:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    made = Libvirt()
    for name in ("find_guest", "stored_definition", "write"):
        monkeypatch.setattr(domains, name, getattr(made, name))
    return made


async def test_to_look_changes_nothing(libvirt: Libvirt) -> None:
    found = await prepare.readiness(HOST, "web1")

    assert (found.lacks, found.changed, found.ready) == (True, False, False)
    assert libvirt.written == []


async def test_what_it_lacks_is_written_once_and_kept_in_the_journal(libvirt: Libvirt) -> None:
    first = await prepare.make_ready(HOST, "web1", CALLER)
    second = await prepare.make_ready(HOST, "web1", CALLER)

    assert (first.changed, first.ready, first.restart) == (True, True, False)
    assert (second.lacks, second.changed, second.ready) == (False, False, True)
    assert len(libvirt.written) == 1
    with Journal() as journal:
        jobs = {one.id: one for one in journal.operations(active=False)}
    assert jobs[first.job or ""].outcome == jobs[second.job or ""].outcome == "completed"


async def test_a_guest_that_runs_stays_as_it_is_until_it_is_started_anew(libvirt: Libvirt) -> None:
    libvirt.running = BARE
    found = await prepare.make_ready(HOST, "web1", CALLER)

    assert (found.changed, found.restart, found.ready) == (True, True, False)


async def test_a_guest_that_is_away_or_busy_is_not_touched(libvirt: Libvirt) -> None:
    libvirt.guest = replace(GUEST, job=GuestJob.OUTGOING)
    with pytest.raises(GuestLocked, match="nothing was changed"):
        await prepare.make_ready(HOST, "web1", CALLER)
    libvirt.guest = None
    with pytest.raises(BadInput, match="alpha has no guest web1"):
        await prepare.make_ready(HOST, "web1", CALLER)

    assert libvirt.written == []


@pytest.mark.parametrize("written", [False, True])
async def test_recovery_tells_which_definition_is_there(libvirt: Libvirt, written: bool) -> None:
    if written:
        await prepare.make_ready(HOST, "web1", CALLER)
    operation: Any = type("Operation", (), {"source": "alpha", "guest_uuid": "u", "guest": "web1"})
    known = Inventory(path=Path("hosts.yaml"), hosts={"alpha": HOST}, observer=None)
    case = OrphanedJob(
        inventory=known, operation=operation, steps=(), recorder=None, caller=CALLER, adopt=False
    )
    told = await prepare.settle(case, ())

    assert told.outcome is (Outcome.COMPLETED if written else Outcome.FAILED)


@pytest.mark.parametrize(
    ("lacks", "restart", "changed", "ready"),
    [
        (False, False, False, True), (True, False, False, False), (True, False, True, True),
        (False, True, False, False), (True, True, True, False),
    ],
)  # fmt: skip
def test_a_guest_is_ready_if_it_is_as_it_should_be(
    lacks: bool, restart: bool, changed: bool, ready: bool
) -> None:
    made = Readiness(
        guest="web1", host="alpha", findings=(), lacks=lacks, restart=restart, changed=changed
    )

    assert made.ready is ready
    assert made.as_json()["ready"] is ready
