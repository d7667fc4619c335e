"""The hints about moves that fail, or whose controller died, are commands that help.

The commands come from the message. tests/fixtures/hints.yaml lists which test runs which hint.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

from tests.lab.bench import BUSY, SLOW, Bench, Done, finish, first_line, until, uuid
from tests.lab.lacking import QEMU, Scene, defined, scene, undone
from tests.support.following import take
from vmckpt.evacuation.report import standbys
from vmckpt.journal.store import Journal
from vmckpt_lab import network

SMALL = {"memory": "128MiB", "dirty": "8MiB@1MiB/s", "disk": "16MiB"}
POWER_BUTTON = bytes.fromhex("ba0206b80001efba0006edf6c40174f7ba0406b80020eff4ebfd")
"""A boot sector for the machine q35 that waits for the ACPI power button, and powers off.

Bit 8 of port 0x602 enables the button, and bit 8 of port 0x600 reports that it was pressed."""


def error(done: Done) -> str:
    """The message of a command that failed."""
    assert done.code, done.out
    return done.err.splitlines()[-1]


def disk(path: Path, kind: str = "raw") -> str:
    return (
        f"<disk type='file' device='disk'><driver name='qemu' type='{kind}'/>"
        f"<source file='{path}'/><target dev='vda' bus='virtio'/></disk>"
    )


@pytest.fixture
def out_of_maintenance(bench: Bench) -> Iterator[None]:
    yield
    for one in bench.good("maintenance", "list", "--json").json:
        bench.good("maintenance", "leave", one["host"])


def test_a_running_guest_with_the_name_is_shut_down_and_renamed(scene: Scene) -> None:
    image = scene.bench.plan.shared / f"{scene.name}.raw"
    image.write_bytes((POWER_BUTTON.ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0"))
    other = (
        f"<domain type='qemu'><name>{scene.name}</name><uuid>{uuid4()}</uuid>"
        "<memory unit='MiB'>32</memory><os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>"
        f"<features><acpi/></features><devices><emulator>{QEMU}</emulator>{disk(image)}</devices>"
        "</domain>"
    )
    scene.start()
    defined(scene, "beta", other)
    try:
        scene.on("beta", "virsh", "start", scene.name)
        shutdown, rename = take(scene.hint(), NEW=f"{scene.name}-2")

        def off() -> bool:
            scene.on("beta", *shutdown.words)  # the firmware may not have enabled the button yet
            time.sleep(0.2)
            return "shut off" in scene.on("beta", "virsh", "domstate", scene.name)

        until(off)
        assert rename.host == "beta"
        scene.on("beta", *rename.words)
        assert scene.blockers() == []
    finally:
        undone(scene, ("destroy", scene.name), ("undefine", f"{scene.name}-2"),
               ("undefine", scene.name))  # fmt: skip


def test_a_network_of_a_display_is_defined_and_started_on_the_target(scene: Scene) -> None:
    path = scene.bench.plan.shared / f"{scene.name}.raw.network"
    (link,) = {
        one["ifname"] for one in json.loads(scene.on("alpha", "ip", "-j", "-4", "addr"))
        if any(found["local"] == scene.bench.plan.host("alpha").address
               for found in one["addr_info"])
    }  # fmt: skip
    try:
        defined(
            scene, "alpha",
            f"<network><name>{scene.name}</name><forward mode='bridge'><interface dev='{link}'/>"
            "</forward></network>",
        )  # fmt: skip
        scene.on("alpha", "virsh", "net-start", scene.name)
        scene.start(
            f"<graphics type='vnc'><listen type='network' network='{scene.name}'/></graphics>"
        )
        path.write_text(scene.on("alpha", "virsh", "net-dumpxml", scene.name))
        scene.run_hint(FILE=str(path))
        assert scene.blockers() == []
        scene.on("beta", "virsh", "net-destroy", scene.name)
        scene.run_hint()
        assert scene.blockers() == []
    finally:
        undone(scene, ("destroy", scene.name), ("net-destroy", scene.name),
               ("net-undefine", scene.name))  # fmt: skip


def test_a_transient_guest_is_prepared_once_it_is_defined(scene: Scene) -> None:
    scene.start()
    path = scene.put("alpha", "definition", scene.on("alpha", "virsh", "dumpxml", scene.name))
    prepare = ("prepare", scene.name, "--yes")
    try:
        scene.bench.follow(error(scene.bench.run(*prepare)), FILE=path)
        scene.bench.good(*prepare)
    finally:
        undone(scene, ("destroy", scene.name), ("undefine", scene.name))


@pytest.mark.long  # fails if the migration is too quick for a sample
def test_a_migration_is_recorded_for_a_replay(scene: Scene) -> None:
    scene.start()
    path = scene.bench.plan.folder / f"{scene.name}.trace"
    path.write_text("no trace\n")
    replay = ("policy", "replay", str(path))
    told = error(scene.bench.run(*replay))
    path.unlink()
    scene.bench.follow(told, GUEST=scene.name, HOST="beta", FILE=str(path))
    scene.bench.good(*replay)
    path.unlink()


@pytest.mark.usefixtures("out_of_maintenance")
def test_a_guest_that_could_not_be_moved_away_has_its_attempts_among_the_jobs(
    scene: Scene,
) -> None:
    """QEMU on beta exits as soon as it is to receive the guest."""
    qemu, policy = str(scene.folder / "qemu"), scene.bench.plan.folder / f"{scene.name}.yaml"
    scene.on("alpha", "ln", "-s", QEMU, qemu)
    scene.put(
        "beta", "qemu", f'#!/bin/sh\ncase "$*" in *-incoming*) exit 1;; esac\nexec {QEMU} "$@"'
    )
    scene.on("beta", "chmod", "755", qemu)
    policy.write_text("version: vmckpt/v1\nname: once\nevacuate: {tries: 1}\n")
    scene.start(emulator=qemu)
    done = scene.bench.run("evacuate", "alpha", "--policy", str(policy), "--yes", "--json")
    policy.unlink()
    assert done.code == 26, done.err
    (left,) = done.json["left"]
    assert re.search(rf"{scene.name}\s.*failed", scene.bench.follow(left["hint"]))
    assert "running" in scene.on("alpha", "virsh", "domstate", scene.name)

    scene.on("beta", "ln", "-sf", QEMU, qemu)
    told = error(scene.bench.run("repopulate", "beta", "--yes"))
    scene.bench.follow(told, GUEST=scene.name)
    assert "running" in scene.on("beta", "virsh", "domstate", scene.name)


def test_a_guest_that_stopped_during_its_move_is_started_again(bench: Bench) -> None:
    bench.guest(**BUSY)
    network.shape(bench.plan, "alpha", SLOW)
    process = bench.start("migrate", "web1", "--to", "beta", "--mode", "precopy")
    first_line(process, "iteration=1")
    bench.inside("alpha", "virsh", "destroy", "web1")
    bench.follow(error(finish(process)))
    assert bench.where() == ["alpha"]


@pytest.fixture
def orphaned(bench: Bench) -> Iterator[Bench]:
    """A slow migration of web1 whose controller was killed. It may go on in post-copy."""
    bench.guest(**BUSY)
    for one in bench.plan.hosts:
        network.shape(bench.plan, one.name, SLOW)
    patient = bench.plan.folder / "patient.yaml"
    patient.write_text(
        "version: vmckpt/v1\nname: patient\nmode: hybrid\nlimits: {max_downtime: 20ms}\n"
        "converge: {rules: [{when: {iteration: 1000}, do: start_postcopy}]}\n"
    )
    process = bench.start("migrate", "web1", "--to", "beta", "--policy", str(patient),
                          "--tls", "off")  # fmt: skip
    first_line(process, "iteration=1")
    process.kill()
    finish(process)
    yield bench
    patient.unlink()
    bench.run("recover")


def test_a_second_running_copy_is_destroyed_and_the_other_one_stays(orphaned: Bench) -> None:
    bench, known = orphaned, uuid(orphaned)
    bench.inside("alpha", "virsh", "domjobabort", "web1")
    until(lambda: "web1" not in bench.inside("beta", "virsh", "list", "--all", "--name"))
    copy = bench.plan.shared / "copy.xml"
    copy.write_text(
        f"<domain type='qemu'><name>web1</name><uuid>{known}</uuid><memory unit='MiB'>32</memory>"
        "<os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>"
        f"<devices><emulator>{QEMU}</emulator></devices></domain>"
    )
    bench.inside("beta", "virsh", "create", str(copy))
    copy.unlink()
    told = bench.run("recover", "--json")
    (found,) = told.json
    assert (told.code, found["outcome"]) == (27, None), told.err
    bench.follow(found["settle"], at="beta", GUEST="web1")
    assert [one["outcome"] for one in bench.good("recover", "--json").json] == ["failed"]
    assert bench.where() == ["alpha"]


@pytest.fixture
def deaf(bench: Bench) -> Iterator[tuple[str, str]]:
    """Options for an inventory with which the controller cannot reach alpha."""
    path = bench.plan.folder / "deaf.yaml"
    told = yaml.safe_load(bench.plan.inventory.read_text())
    told["hosts"]["alpha"]["uri"] = "qemu+tcp://127.0.0.1:1/system"
    path.write_text(yaml.safe_dump(told, sort_keys=False))
    yield "--inventory", str(path)
    path.unlink()


def test_a_migration_without_a_controller_gets_other_limits_and_ends_in_post_copy(
    orphaned: Bench, deaf: tuple[str, str]
) -> None:
    for option, value, shown in (("bandwidth", "2MiB/s", "speed"), ("max-downtime", "40ms", "")):
        orphaned.follow(error(orphaned.run("set", "web1", f"--{option}", value, *deaf)))
        get = f"migrate-get{shown or 'maxdowntime'}"
        found = orphaned.inside("alpha", "virsh", "-q", get, "web1").strip()
        assert found == re.sub("[^0-9]", "", value)
    orphaned.follow(error(orphaned.run("postcopy", "web1", *deaf)))
    until(lambda: orphaned.where() == ["beta"], limit=60)


@pytest.mark.long
@pytest.mark.usefixtures("out_of_maintenance")
def test_a_guest_with_a_standby_is_free_after_each_hint_that_ends_its_protection(
    bench: Bench,
) -> None:
    bench.guest(**SMALL, shared_memory=True, private_disk=True)
    protect = ("protect", "web1", "--to", "beta", "--interval", "300ms", "--failover", "manual")
    try:
        for words_ in (
            ("cancel", "web1"), ("migrate", "web1", "--to", "beta"),
            ("evacuate", "beta", "--dry-run"),
        ):  # fmt: skip
            bench.good(*protect)
            bench.follow(error(bench.run(*words_)))
            assert bench.good("status", "--json").json == []

        # As after a relocation of the standby that failed.
        bench.good(*protect)
        intent = {"guest": "web1", "uuid": uuid(bench), "from": "beta",
                  "command": " ".join(("vmckpt", *protect))}  # fmt: skip
        with Journal(bench.plan.folder / "state" / "journal.db") as journal:
            protections = [one for one in journal.operations(active=True) if one.target == "beta"]
        _, (bare,) = standbys([intent], protections)
        bench.follow(bare.hint)
        again = bare.hint.partition(", then vmckpt ")[2]
        bench.good(*again.split())
        assert [one["backup"] for one in bench.good("status", "--json").json] == ["beta"]
    finally:
        bench.run("unprotect", "web1")


__all__ = ["scene"]
