"""What is decided before a start, as far as it needs no host."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.builders import FACTS, GUEST, HOST, host_facts
from vmckpt.errors import InventoryError
from vmckpt.hypervisor import same_host
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal.migration_history import PastMove
from vmckpt.migration import request
from vmckpt.migration.plan import planner
from vmckpt.migration.plan.facts import Facts
from vmckpt.migration.plan.planner import NO_COPIES
from vmckpt.model.finding import Severity
from vmckpt.model.migration import Driver, Mode, MoveOrder
from vmckpt.model.same_host import SameUuid
from vmckpt.policy import loader, select
from vmckpt.units import GIB, Bytes, Seconds

BALANCED = select.by_name(loader.load_all(None), "balanced")
POSTCOPY = replace(BALANCED, mode=Mode.POSTCOPY)


def possible(facts: Facts, policy: Any = BALANCED) -> bool:
    return planner._post_copy(policy, facts, planner.conflicts(policy, facts, NO_COPIES))


def test_post_copy_is_used_only_where_it_was_seen_to_be_possible() -> None:
    assert possible(FACTS)
    assert not possible(replace(FACTS, post_copy_error="no userfaultfd"))
    assert not possible(replace(FACTS, post_copy_asked=False))
    assert possible(replace(FACTS, post_copy_asked=False), POSTCOPY)


@pytest.mark.parametrize(("folder", "can"), [("tmpfs", True), ("ext2/ext3", False), (None, False)])
def test_memory_in_a_file_can_go_by_post_copy_only_from_tmpfs(folder: str, can: bool) -> None:
    in_file = replace(FACTS, guest=replace(GUEST, file_memory=True), memory_folder=folder)

    assert possible(in_file) is can


def test_what_could_not_be_asked_about_post_copy_is_a_warning() -> None:
    (found,) = planner._why_no_post_copy(BALANCED, replace(FACTS, post_copy_asked=False))

    assert (found.code, found.severity) == ("post-copy-unproven", Severity.WARNING)
    assert "post-copy is not used" in found.text


def test_copied_disks_count_for_the_time_limit() -> None:
    alone = request.terms(BALANCED, Mode.PRECOPY, GUEST)
    along = request.terms(BALANCED, Mode.PRECOPY, GUEST, Bytes(20 * GIB))

    assert alone.time_limit == Seconds(150)
    assert along.time_limit == Seconds(150 * 20.25)


def test_the_journal_gets_the_order_without_definitions_that_may_hold_passwords() -> None:
    order = MoveOrder(
        driver=Driver.PEER_TO_PEER, persistent=True, autostart=False, storage_proven=True,
        bandwidth=None, post_copy=True, copied_disks=("vda",),
        target_xml="<domain passwd='x'/>", target_definition="<domain passwd='x'/>",
    )  # fmt: skip
    stored = order.as_json()

    assert "passwd" not in str(stored)
    assert MoveOrder.from_json(stored) == replace(order, target_xml=None, target_definition=None)


@pytest.mark.parametrize(
    ("mode", "probe", "every_mode", "measured"),
    [
        (Mode.AUTO, None, False, 1.0),
        (Mode.HYBRID, None, False, 1.0),
        (Mode.PRECOPY, None, False, 1.0),
        # These begin at once: no forecast could change them.
        (Mode.POSTCOPY, None, False, 0.0),
        (Mode.STOP_AND_COPY, None, False, 0.0),
        # A forecast was asked for.
        (Mode.POSTCOPY, None, True, 1.0),
        (Mode.POSTCOPY, 5.0, False, 5.0),
        (Mode.AUTO, 0.0, False, 0.0),
    ],
)
def test_a_migration_waits_only_for_a_forecast_that_can_change_it(
    mode: Mode, probe: float | None, every_mode: bool, measured: float
) -> None:
    async def past() -> Sequence[PastMove]:
        return ()

    ahead = planner.ForecastOptions(
        past=past, probe=None if probe is None else Seconds(probe), every_mode=every_mode
    )

    assert planner.probe_of(replace(BALANCED, mode=mode), ahead) == measured


@pytest.mark.parametrize("one", [True, None, False])
async def test_one_host_under_two_names_is_said_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, one: bool | None
) -> None:
    """Its hints were to undefine the guest "there", which is here."""
    asked: list[tuple[str, ...]] = []

    async def among(hosts: tuple[Hypervisor, ...]) -> tuple[SameUuid, ...]:
        asked.append(tuple(host.host.name for host in hosts))
        return (SameUuid(first="alpha", second="beta", one=one, why="x"),)

    monkeypatch.setattr(same_host, "among", among)
    here, there = (Hypervisor(replace(HOST, name=name)) for name in ("alpha", "beta"))
    twins = replace(FACTS, source_facts=host_facts("u"), target_facts=host_facts("u"))
    if one is False:  # preflight reports the clone
        await planner._require_two_hosts(twins, here, there)
    else:
        with pytest.raises(InventoryError, match="alpha and beta are one host"):
            await planner._require_two_hosts(twins, here, there)
    assert asked == [("alpha", "beta")]
    await planner._require_two_hosts(replace(twins, target_facts=host_facts("other")), here, there)
    await planner._require_two_hosts(replace(twins, target=twins.source), here, here)
    assert len(asked) == 1
