from dataclasses import replace

import pytest

from tests.support.builders import host_facts
from tests.support.snapshots import FACTS, PUBLIC
from vmckpt.model.finding import Severity
from vmckpt.snapshot.restore.compatibility import Side, check_compatibility
from vmckpt.store.format.metadata import Contents
from vmckpt.units import Bytes

FIRMWARE = FACTS.boot_files[0]
SIDE = Side(
    host="beta", facts=host_facts("b"), cpu_fits=True, on_host={FIRMWARE: True},
    disks={"vda": Bytes(200000)}, ram={"pc.ram": Bytes(32768)},
)  # fmt: skip
DISKS = replace(PUBLIC, contents=Contents.DISKS)
NVRAM = replace(FACTS, domain_xml="<domain><os><nvram>/x</nvram></os><devices><tpm model='a'/>")


def codes(side: Side, public: object = PUBLIC, facts: object = FACTS) -> dict[str, str]:
    assert isinstance(public, type(PUBLIC))
    assert isinstance(facts, type(FACTS))
    return {one.code: one.severity.value for one in check_compatibility(public, facts, {}, side)}


def test_the_host_that_made_it_can_run_it() -> None:
    assert check_compatibility(PUBLIC, FACTS, {}, SIDE) == []


@pytest.mark.parametrize(
    ("side", "found"),
    [
        pytest.param(replace(SIDE, facts=replace(SIDE.facts, qemu_version="7.1.9")),
            {"qemu-older": "blocker"}, id="older QEMU"),
        pytest.param(replace(SIDE, facts=replace(SIDE.facts, qemu_version="7.2.0")), {},
            id="the same release"),
        pytest.param(replace(SIDE, facts=replace(SIDE.facts, qemu_version="10.0.2")), {},
            id="newer QEMU"),
        pytest.param(replace(SIDE, facts=replace(SIDE.facts, qemu_version="git")),
            {"qemu-version-unknown": "warning"}, id="unknown QEMU"),
        pytest.param(replace(SIDE, facts=replace(SIDE.facts, machines=frozenset({"pc"}))),
            {"machine-missing": "blocker"}, id="machine"),
        pytest.param(replace(SIDE, facts=replace(SIDE.facts, accelerators=frozenset({"qemu"}))),
            {"accelerator-missing": "blocker"}, id="accelerator"),
        pytest.param(replace(SIDE, cpu_fits=False), {"cpu-lacks-features": "blocker"}, id="CPU"),
        pytest.param(replace(SIDE, cpu_fits=None), {"cpu-not-compared": "warning"}, id="CPU?"),
        pytest.param(replace(SIDE, on_host={FIRMWARE: False}), {"boot-file-missing": "blocker"},
            id="firmware"),
        pytest.param(replace(SIDE, on_host={}), {"boot-file-not-asked": "warning"}, id="firmware?"),
        pytest.param(replace(SIDE, drives={"sda": "/iso/a.iso"}, on_host={
            FIRMWARE: True, "/iso/a.iso": False}), {"drive-missing": "blocker"}, id="CD"),
        pytest.param(replace(SIDE, drives={"sda": "/iso/a.iso"}, on_host={
            FIRMWARE: True, "/iso/a.iso": True}), {}, id="CD that is there"),
        pytest.param(replace(SIDE, disks={"vda": Bytes(199999)}), {"disk-size": "blocker"},
            id="smaller disk"),
        pytest.param(replace(SIDE, disks={"vda": Bytes(200001)}), {"disk-size": "blocker"},
            id="larger disk"),
        pytest.param(replace(SIDE, disks={"vdb": Bytes(1)}), {"disk-unknown": "blocker"},
            id="another disk"),
        pytest.param(replace(SIDE, disks={}), {}, id="new images"),
        pytest.param(replace(SIDE, ram={}), {"ram-block": "blocker"}, id="block missing"),
        pytest.param(replace(SIDE, ram={"pc.ram": Bytes(1)}), {"ram-block": "blocker"},
            id="block of another size"),
        pytest.param(replace(SIDE, ram={"pc.ram": Bytes(32768), "vga": Bytes(1)}),
            {"ram-block": "blocker"}, id="a block more"),
        pytest.param(replace(SIDE, ram=None), {}, id="not started yet"),
        pytest.param(replace(SIDE, facts=replace(SIDE.facts, memory_free=Bytes(32767))),
            {"memory-short": "warning"}, id="memory"),
    ],
)  # fmt: skip
def test_each_mismatch_is_named(side: Side, found: dict[str, str]) -> None:
    assert codes(side) == found


@pytest.mark.parametrize(
    ("side", "found"),
    [
        (replace(SIDE, facts=replace(SIDE.facts, qemu_version="6.0.0")), {"qemu-older": "warning"}),
        (replace(SIDE, cpu_fits=False), {"cpu-lacks-features": "warning"}),
        (replace(SIDE, facts=replace(SIDE.facts, accelerators=frozenset())),
            {"accelerator-missing": "warning"}),
        (replace(SIDE, facts=replace(SIDE.facts, machines=frozenset())),
            {"machine-missing": "blocker"}),
        (replace(SIDE, ram={}), {}),
    ],
)  # fmt: skip
def test_disks_alone_mind_less(side: Side, found: dict[str, str]) -> None:
    assert codes(side, DISKS) == found


def test_state_of_nvram_and_tpm_that_was_not_kept_is_missed() -> None:
    kept = {"nvram": b"", "tpm/tpm2-00.permall": b""}

    assert codes(SIDE, facts=NVRAM) == {"nvram-missing": "warning", "tpm-missing": "warning"}
    assert check_compatibility(PUBLIC, NVRAM, kept, SIDE) == []


def test_a_guest_without_a_cpu_model_fits_every_cpu() -> None:
    assert codes(replace(SIDE, cpu_fits=None), facts=replace(FACTS, cpu_xml=None)) == {}


def test_blockers_come_first_and_each_says_where_and_what_to_do() -> None:
    side = replace(SIDE, cpu_fits=None, ram={}, disks={"vda": Bytes(1)})
    found = check_compatibility(PUBLIC, FACTS, {}, side)

    assert [one.code for one in found] == ["disk-size", "ram-block", "cpu-not-compared"]
    assert {one.where for one in found} == {"beta"}
    assert all(one.hint for one in found if one.severity is Severity.BLOCKER)
