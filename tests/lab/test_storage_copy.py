"""Disks that the hosts do not share, copied with the guest on real hosts."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench import WHOLE, Bench, until, uuid
from tests.lab.moving import move, over_ssh, planned, prepared
from vmckpt.errors import BadInput, RemoteError
from vmckpt.hypervisor import storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.migration.plan import storage_cleanup, storage_copy
from vmckpt.migration.plan.storage_cleanup import Tidied
from vmckpt.model.disk import CopyOptions, CopyPlan, Made
from vmckpt.model.migration import Driver
from vmckpt.remote.ssh import Remote
from vmckpt.units import MIB, parse_rate

PRIVATE: dict[str, Any] = {
    "memory": "192MiB", "dirty": "16MiB@1MiB/s", "disk": "512MiB", "written": "20MiB",
    "private_disk": True,
}  # fmt: skip


def removed(bench: Bench, made: Made) -> tuple[str, ...]:
    return over_ssh(bench, lambda _here, there: storage_copy.remove(there, made))


def inside(bench: Bench, host: str, path: str) -> Path:
    """A path of a host's private storage, as this machine sees it."""
    return bench.plan.host(host).root / "private" / Path(path).relative_to(bench.plan.private)


def taken(path: Path) -> float:
    """MiB that a file takes."""
    return path.stat().st_blocks * 512 / MIB


def codes(plan: CopyPlan) -> list[str]:
    return [finding.code for finding in plan.findings]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.parametrize(
    ("full", "kind"),
    [
        (False, "qcow2"),
        (True, "raw"),
        pytest.param(False, "raw", marks=pytest.mark.campaign),
        pytest.param(True, "qcow2", marks=pytest.mark.campaign),
    ],
    ids=["thin-qcow2", "full-raw", "thin-raw", "full-qcow2"],
)
def test_a_private_disk_travels_along(bench: Bench, kind: str, full: bool) -> None:
    guest = bench.guest(**PRIVATE, disk_format=kind)
    plan = planned(bench, CopyOptions(full=full))
    assert codes(plan) == ["disk-copied"]
    assert plan.disks == ("vda",)
    assert plan.left_behind == (guest.disk_path,)
    prepared(bench, plan)
    moved = move(bench, copied_disks=plan.disks, storage_proven=False)

    async def finish(source: Hypervisor) -> Tidied:
        async with Remote(source.host) as here, Remote(bench.inventory.host("beta")) as there:
            return await storage_cleanup.finish(plan, {}, source, (here, there), lambda: None)

    assert moved.explained == ""
    assert bench.ask("alpha", finish) == Tidied()
    assert bench.where() == ["beta"]
    new, left = (inside(bench, host, guest.disk_path) for host in ("beta", "alpha"))
    assert 20 <= taken(left) < 24
    assert (taken(new) >= 512) if full else (20 <= taken(new) < 24)
    assert new.stat().st_mode == left.stat().st_mode
    before = digest(left)
    assert bench.ledgers() == WHOLE
    assert digest(left) == before
    assert any(sample.total > 500 * MIB for sample in moved.samples)


def test_a_copy_may_get_another_folder(bench: Bench) -> None:
    guest = bench.guest(**PRIVATE)
    folder = bench.plan.private / "new & old"
    inside(bench, "beta", str(folder)).mkdir(exist_ok=True)
    known = uuid(bench)
    plan = planned(bench, CopyOptions(folder=str(folder)))
    assert plan.placed == {"vda": str(folder / "web1.raw")}
    running, stored = bench.ask(
        "alpha", lambda source: storage.definitions_with_images_at(source, known, plan.placed)
    )
    prepared(bench, plan)
    moved = move(
        bench, copied_disks=plan.disks, storage_proven=False,
        target_xml=running, target_definition=stored,
    )  # fmt: skip

    assert moved.explained == ""
    assert bench.ledgers() == WHOLE
    assert not inside(bench, "beta", guest.disk_path).exists()
    for which in ([], ["--inactive"]):
        xml = bench.inside("beta", "virsh", "dumpxml", "web1", *which)
        assert [drive.path for drive in storage.read_drives(xml)] == [str(folder / "web1.raw")]


def test_a_folder_may_be_a_pool(bench: Bench) -> None:
    folder = bench.plan.private / "pool"
    inside(bench, "beta", str(folder)).mkdir(exist_ok=True)
    bench.inside("beta", "virsh", "-q", "pool-create-as", "tank", "dir", "--target", str(folder))
    try:
        found = bench.ask("beta", lambda target: storage.folder_of(target, "tank"))
        with pytest.raises(BadInput, match="no storage pool 'tnak'"):
            bench.ask("beta", lambda target: storage.folder_of(target, "tnak"))
    finally:
        bench.inside("beta", "virsh", "-q", "pool-destroy", "tank")

    assert found == str(folder)
    assert bench.ask("beta", lambda target: storage.folder_of(target, "/srv/")) == "/srv"


def test_an_aborted_copy_leaves_nothing_on_the_target(bench: Bench) -> None:
    guest = bench.guest(**PRIVATE)
    plan = planned(bench, CopyOptions())
    made = prepared(bench, plan)
    moved = move(
        bench, copied_disks=plan.disks, storage_proven=False, bandwidth=parse_rate("2MiB/s"),
        abort_after=2.0,
    )  # fmt: skip

    assert moved.error is not None
    assert bench.where() == ["alpha"]
    assert inside(bench, "beta", guest.disk_path).exists()
    assert removed(bench, made) == ()
    assert not inside(bench, "beta", guest.disk_path).exists()
    assert bench.ledgers() == WHOLE


def test_a_file_that_is_there_is_neither_written_over_nor_removed(bench: Bench) -> None:
    guest = bench.guest(**PRIVATE)
    plan = planned(bench, CopyOptions())
    path = inside(bench, "beta", guest.disk_path)
    path.write_text("somebody's")

    with pytest.raises(RemoteError, match="File exists"):
        prepared(bench, plan)
    assert path.read_text() == "somebody's"
    path.unlink()
    made = prepared(bench, plan)
    path.unlink()
    path.write_text("somebody's")
    left = removed(bench, made)
    assert "the file was replaced meanwhile" in left[0]
    assert path.read_text() == "somebody's"
    assert codes(planned(bench, CopyOptions())) == ["disk-copied", "disk-in-the-way"]


@pytest.mark.long
def test_an_image_that_a_guest_runs_on_is_not_removed(bench: Bench) -> None:
    guest = bench.guest(**PRIVATE)
    plan = planned(bench, CopyOptions())
    made = prepared(bench, plan)
    assert move(bench, copied_disks=plan.disks, storage_proven=False).good

    assert removed(bench, made) == (f"{guest.disk_path} (a QEMU has it open)",)
    assert bench.ledgers() == WHOLE


def test_a_copy_to_a_wrong_name_is_refused_and_named(bench: Bench) -> None:
    guest = bench.guest(**PRIVATE)
    plan = planned(bench, CopyOptions())
    made = prepared(bench, plan)
    moved = move(bench, copied_disks=plan.disks, storage_proven=False, tls_name="gamma")

    assert "beta: " in moved.explained
    assert "'gamma'" in moved.explained
    assert removed(bench, made) == ()
    assert not inside(bench, "beta", guest.disk_path).exists()
    assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_post_copy_goes_with_copied_disks(bench: Bench) -> None:
    bench.guest(memory="192MiB", dirty="64MiB@30MiB/s", disk="32MiB", private_disk=True)
    plan = planned(bench, CopyOptions())
    prepared(bench, plan)
    moved = move(
        bench, switch_in_pass=2, post_copy=True, copied_disks=plan.disks, storage_proven=False,
        bandwidth=parse_rate("40MiB/s"), tls_name="beta",
    )  # fmt: skip

    assert moved.explained == ""
    assert bench.where() == ["beta"]
    assert bench.ledgers() == WHOLE


@pytest.mark.parametrize("wishes", [{"connections": 2}, {"live": False}, {"tls_name": "beta"}])
@pytest.mark.long
def test_copied_disks_go_with(bench: Bench, wishes: dict[str, Any]) -> None:
    bench.guest(**PRIVATE)
    plan = planned(bench, CopyOptions())
    prepared(bench, plan)
    moved = move(
        bench, copied_disks=plan.disks, storage_proven=False, driver=Driver.CLIENT, **wishes
    )

    assert moved.explained == ""
    assert bench.ledgers() == WHOLE


def test_an_image_with_another_below_it_is_refused_by_name(bench: Bench) -> None:
    guest = bench.guest(**PRIVATE, disk_format="qcow2")
    overlay = guest.disk_path.replace(".qcow2", ".overlay.qcow2")
    bench.inside(
        "alpha", "virsh", "-q", "snapshot-create-as", "web1", "--disk-only", "--no-metadata",
        "--diskspec", f"vda,file={overlay}",
    )  # fmt: skip
    plan = planned(bench, CopyOptions())
    (bench.plan.host("alpha").root / "private" / Path(overlay).name).unlink()

    assert codes(plan) == ["disk-backing"]
    assert guest.disk_path in plan.findings[0].text
    assert plan.copies == ()


def test_an_overlay_of_a_shared_base_stays_one(bench: Bench) -> None:
    guest = bench.guest(**PRIVATE, disk_format="qcow2")
    base = str(Path(bench.plan.shared) / "base.qcow2")
    bench.inside("alpha", "virsh", "destroy", "web1")
    bench.inside("alpha", "mv", guest.disk_path, base)
    above = ("qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, guest.disk_path)
    bench.inside("alpha", *above)
    heard = bench.seen().heard
    bench.inside("alpha", "virsh", "start", "web1")
    until(lambda: bench.seen().heard > heard + 5, limit=60)
    known = bench.ask("alpha", lambda hypervisor: find_guest(hypervisor, "web1"))
    assert known is not None
    chains = {disk.target: disk.below for disk in known.disks}
    assert chains == {"vda": (base,)}
    plan = planned(bench, CopyOptions(), chains)
    assert codes(plan) == ["disk-copied"]
    prepared(bench, plan)
    moved = move(bench, copied_disks=plan.disks, shallow=plan.shallow, storage_proven=False)

    assert moved.explained == ""
    assert bench.where() == ["beta"]
    new = inside(bench, "beta", guest.disk_path)
    assert taken(new) < 20, "what was written before is in the base"
    assert f"backing file: {base}" in bench.inside(
        "beta", "qemu-img", "info", "-U", guest.disk_path
    )
    said = bench.inside("beta", "virsh", "dumpxml", "web1")
    assert base in said


def test_what_is_shared_is_not_copied_onto_itself(bench: Bench) -> None:
    bench.guest(memory="128MiB", dirty="16MiB@1MiB/s", disk="16MiB")

    assert planned(bench, CopyOptions()) == CopyPlan(rest_shared=True)
    assert codes(planned(bench, CopyOptions(disks=("vda",)))) == [
        "disk-shared", "disk-copied", "disk-in-the-way",
    ]  # fmt: skip
