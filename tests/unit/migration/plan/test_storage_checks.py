"""Whether both hosts have the same disks, and what is said if not."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support import foreign
from tests.support.builders import FACTS, GUEST
from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Answer, Resource
from vmckpt.migration.plan import preflight, storage_checks
from vmckpt.migration.plan.facts import Facts
from vmckpt.model.finding import Severity

DISK = GUEST.disks[0]


def guest(**changes: Any) -> Facts:
    return replace(FACTS, guest=replace(GUEST, **changes))


def test_storage_that_was_not_looked_at_is_not_proven() -> None:
    assert storage_checks.storage_proven(FACTS)
    assert not storage_checks.storage_proven(replace(FACTS, same_file={}))


@pytest.mark.parametrize("kind", ["volume", "block", "dir"])
def test_one_disk_that_cannot_be_proven_leaves_all_to_libvirt(kind: str) -> None:
    facts = guest(disks=(DISK, replace(DISK, target="vdb", kind=kind, source="pool/x")))

    assert not storage_checks.storage_proven(facts)
    assert [f.code for f in preflight.check_move(facts)] == ["storage-unproven"]


def test_network_disks_are_shared_by_nature_and_media_need_only_be_there() -> None:
    remote = replace(DISK, target="vdb", kind="network", source="pool/x")
    medium = replace(DISK, target="sda", source="/iso/a.iso", read_only=True)
    facts = replace(guest(disks=(DISK, remote, medium)), on_target={"/iso/a.iso": True})

    assert storage_checks.storage_proven(facts)
    assert preflight.check_move(facts) == ()


def test_an_image_that_a_disk_lies_on_must_be_the_same_or_hold_the_same() -> None:
    on = replace(DISK, below=("/base.raw",))
    facts = replace(guest(disks=(on,)), on_target={"/srv/web1.raw": True, "/base.raw": True})
    same = replace(facts, same_file={"/srv/web1.raw": True, "/base.raw": True})
    assert preflight.check_move(same) == ()
    assert storage_checks.storage_proven(same)
    another = replace(facts, same_file={"/srv/web1.raw": True, "/base.raw": False})
    (found,) = preflight.check_move(another)
    assert (found.code, found.severity) == ("storage-backing", Severity.WARNING)
    assert not storage_checks.storage_proven(another)
    assert not storage_checks.storage_proven(replace(facts, same_file={"/srv/web1.raw": True}))
    assert not storage_checks.storage_proven(guest(disks=(replace(DISK, on_device=True),)))


def test_a_disk_without_a_path_is_no_empty_drive_unless_it_may_be_one() -> None:
    nvme = replace(DISK, kind="nvme", source=None)
    assert not storage_checks.storage_proven(guest(disks=(nvme,)))
    assert storage_checks.storage_proven(guest(disks=(replace(DISK, source=None),)))


def test_a_block_device_with_the_same_identity_is_the_same_disk() -> None:
    facts = guest(disks=(replace(DISK, kind="block", source="/dev/vg/a"),))
    same = replace(facts, same_file={"/dev/vg/a": True})
    (other,) = preflight.check_move(replace(facts, same_file={"/dev/vg/a": False}))
    (unknown,) = preflight.check_move(replace(facts, same_file={}))

    assert preflight.check_move(same) == ()
    assert storage_checks.storage_proven(same)
    assert (other.code, other.severity) == ("storage-not-visible", Severity.BLOCKER)
    assert unknown.code == "storage-unproven"
    assert "lsblk -o NAME,WWN,UUID" in (unknown.hint or "")


def test_a_block_device_that_is_missing_is_a_blocker() -> None:
    facts = guest(disks=(replace(DISK, kind="block", source="/dev/vg/a"),))
    (found,) = preflight.check_move(replace(facts, on_target={"/dev/vg/a": False}))

    assert (found.code, found.severity) == ("storage-not-visible", Severity.BLOCKER)


def test_a_cd_that_libvirt_drops_is_no_obstacle_and_another_is_to_be_ejected() -> None:
    cd = replace(DISK, target="sda", source="/iso/a.iso", read_only=True, device="cdrom")
    facts = replace(guest(disks=(DISK, cd)), on_target={"/iso/a.iso": False})
    dropped = replace(facts, guest=replace(GUEST, disks=(DISK, replace(cd, optional=True))))
    (found,) = preflight.check_move(facts)
    (warned,) = preflight.check_move(dropped)

    assert (found.code, found.hint) == (
        "storage-not-visible", "eject it: run virsh change-media web1 sda --eject on alpha"
    )  # fmt: skip
    assert (warned.code, warned.severity) == ("medium-dropped", Severity.WARNING)


def test_a_read_only_disk_that_is_another_file_there_is_a_warning() -> None:
    golden = replace(DISK, target="vdb", source="/local/golden.img", read_only=True)
    facts = replace(
        guest(disks=(DISK, golden)), same_file={**FACTS.same_file, "/local/golden.img": False}
    )
    (found,) = preflight.check_move(facts)

    assert (found.code, found.severity) == ("storage-read-only", Severity.WARNING)


def test_the_cache_of_a_disk_that_is_copied_does_not_matter() -> None:
    unsafe = guest(disks=(replace(DISK, cache="unsafe"),))

    assert [one.code for one in preflight.check_move(unsafe)] == ["cache-mode"]
    assert preflight.check_move(replace(unsafe, copied=frozenset({"/srv/web1.raw"}))) == ()


def test_an_external_data_file_is_part_of_the_disk() -> None:
    facts = guest(disks=(replace(DISK, data_file="/local/web1.data"),))
    same = {**FACTS.same_file, "/local/web1.data": True}
    another = {**same, "/local/web1.data": False}

    assert not storage_checks.storage_proven(facts)
    assert [one.code for one in preflight.check_move(facts)] == ["storage-unproven"]
    assert storage_checks.storage_proven(replace(facts, same_file=same))
    (found,) = preflight.check_move(replace(facts, same_file=another))
    assert (found.code, found.severity) == ("storage-not-visible", Severity.BLOCKER)
    assert foreign.guest("preflight-disk-datastore-qcow2-data-file").disks[0].data_file


def test_a_volume_that_is_missing_is_reported_once() -> None:
    pool = Resource(kind=Kind.POOL, name="fast", device="disk vda")
    facts = replace(
        guest(disks=(replace(DISK, kind="volume", source="v"),)), needs=(pool,),
        answers={pool: Answer.INACTIVE},
    )  # fmt: skip
    (found,) = preflight.check_move(facts)

    assert (found.code, found.hint) == ("pool-missing", "run virsh pool-start fast on beta")
