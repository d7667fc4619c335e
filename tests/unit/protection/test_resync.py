"""Which images a protection in the other direction takes, by what is known and what is there."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.earlier_protections import FAILED_OVER, KNOWN, past
from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import OrphanedJob
from vmckpt.journal.records import Operation, StoredStep
from vmckpt.model.events import Caller
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.protection import agent_client, recovery, stop
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.resync import Before, ImageAdoption, decide, earlier, wanted
from vmckpt.replication.backup.standby_setup import Image
from vmckpt.units import MIB, Bytes

DISKS: list[dict[str, Any]] = [
    {"name": "vda", "source": "/new/a.qcow2", "format": "qcow2", "size": MIB},
    {"name": "vdb", "source": "/new/b.raw", "format": "raw", "size": 2 * MIB},
]


A = Image(path="/srv/a.qcow2", size=Bytes(MIB))


B = Image(path="/srv/b.raw", size=Bytes(2 * MIB))


BOTH = Before(runs=False, images={"vda": A, "vdb": B})


UNPROTECTED = past({"unprotected": True, "runs_on": "alpha"}, session="other")


CANCELLED = past(None, session="other")


@pytest.mark.parametrize(
    "operations",
    [
        [FAILED_OVER],
        [past({"unprotected": True, "runs_on": "beta"})],
        [past({"failed_over": "beta", "recovered": {"truth": "web1 runs on beta"}})],
        [CANCELLED, FAILED_OVER, past({"failed_over": "alpha"}, source="beta", target="alpha")],
        # Protected in the other direction meanwhile, and let go again.
        [past({"unprotected": True, "runs_on": "beta"}, source="beta", target="alpha",
              session="other"), FAILED_OVER],
    ],
    ids=["failed over", "unprotected where it runs", "recovered", "there and back", "twice"],
)  # fmt: skip
def test_the_protection_that_brought_it_there_is_found(
    operations: list[tuple[Operation, Sequence[StoredStep]]],
) -> None:
    assert earlier(operations, "beta") == KNOWN


@pytest.mark.parametrize(
    "operations",
    [
        [],
        [CANCELLED],
        [UNPROTECTED],
        [past({"failed_over": "gamma"}, target="gamma"), FAILED_OVER],
        [past({"failed_over": "beta"}, name="else")],
        [past({"error": "no"})],
    ],
    ids=["none", "cancelled", "it stayed", "elsewhere since", "it had not begun", "failed"],
)  # fmt: skip
def test_where_it_did_not_come_by_one_nothing_is_known(
    operations: list[tuple[Operation, Sequence[StoredStep]]],
) -> None:
    assert earlier(operations, "beta") is None


def test_one_of_an_older_version_tells_no_images() -> None:
    assert earlier([past({"failed_over": "beta"}, images=None)], "beta") == replace(
        KNOWN, images={}
    )


def test_only_disks_that_are_known_are_looked_at() -> None:
    more = [*DISKS, {"name": "vdc", "source": "/new/c", "format": "raw", "size": 1}]
    assert wanted(KNOWN, more) == {
        "vda": ("/srv/a.qcow2", "qcow2"), "vdb": ("/srv/b.raw", "raw"),
    }  # fmt: skip
    assert wanted(None, DISKS) == {}


def codes(found: Sequence[Finding]) -> list[tuple[str, Severity]]:
    return [(one.code, one.severity) for one in found]


def test_images_that_fit_are_taken_and_named() -> None:
    told = decide(KNOWN, BOTH, DISKS, "alpha")
    assert told.images == {"vda": "/srv/a.qcow2", "vdb": "/srv/b.raw"}
    assert codes(told.findings) == [("image-taken", Severity.INFO)] * 2
    assert "vda: /srv/a.qcow2 is reused" in told.findings[0].text


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (replace(A, there=False, size=None), "/srv/a.qcow2 does not exist"),
        (replace(A, regular=False, size=None), "is not a regular file"),
        (replace(A, size=Bytes(MIB - 1)), "has 1048575 bytes, but the disk has 1048576"),
        (replace(A, user="db1"), "is used by guest db1"),
        (replace(A, size=None, says="no qcow2"), "cannot be read: no qcow2"),
        (replace(A, path="/new/b.raw"), "the guest is using /new/b.raw now"),
        (None, "the journal has no record of a former image"),
    ],
)
def test_one_that_does_not_fit_is_named_and_the_others_are_taken(
    image: Image | None, why: str
) -> None:
    images = {"vdb": B} if image is None else {"vda": image, "vdb": B}
    told = decide(KNOWN, replace(BOTH, images=images), DISKS, "alpha")
    assert told.images == {"vdb": "/srv/b.raw"}
    assert codes(told.findings) == [
        ("image-not-taken", Severity.WARNING), ("image-taken", Severity.INFO),
    ]  # fmt: skip
    assert told.findings[0].text.startswith("vda: ")
    assert why in told.findings[0].text


def test_while_its_qemu_lives_there_nothing_is_taken() -> None:
    told = decide(KNOWN, replace(BOTH, runs=True), DISKS, "alpha")
    assert told.images == {}
    (found,) = told.findings
    assert (found.severity, found.hint) == (Severity.BLOCKER, "run vmckpt recover")


def test_where_nothing_is_known_that_is_said_and_all_is_copied() -> None:
    told = decide(None, None, DISKS, "alpha")
    assert told.images == {}
    assert codes(told.findings) == [("image-not-taken", Severity.WARNING)]
    assert "all of the guest's disks are copied" in told.findings[0].text
    assert ImageAdoption().findings == ()


async def test_a_failover_that_recovery_finds_is_written_down_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nobody would know later where the guest was before."""

    async def status(host: Host, _: str) -> ProtectionStatus:
        over = {"role": "backup", "outcome": "failed-over", "why": "silent"}
        return parse_answer(
            over if host.name == "beta" else {"role": None, "runs": False, "known": False}
        )

    async def tidy(_: object) -> None:
        pass

    monkeypatch.setattr(agent_client, "status", status)
    monkeypatch.setattr(stop, "tidy", tidy)
    hosts = {name: Host(name=name, uri=f"qemu+tcp://{name}/system") for name in ("alpha", "beta")}
    finished: list[tuple[Outcome, Mapping[str, Any]]] = []
    inventory = SimpleNamespace(host=hosts.__getitem__, lease=None)
    case = OrphanedJob(
        inventory=cast("Inventory", inventory),
        operation=cast("Operation", SimpleNamespace(
            id="P1", guest="web1", guest_uuid="u-1", source="alpha", target="beta",
        )),
        steps=past(None)[1], adopt=False, caller=cast("Caller", None),
        recorder=cast("Any", SimpleNamespace(finish=lambda *told: finished.append(told))),
    )  # fmt: skip
    await recovery.settle(case, ())
    ((outcome, report),) = finished
    assert outcome is Outcome.COMPLETED
    operation = SimpleNamespace(source="alpha", target="beta", report=report)
    assert earlier([(cast("Operation", operation), past(None)[1])], "beta") == KNOWN
