"""The hints of a move's preflight are commands that help: each is run in its situation.

The commands come from the message. tests/fixtures/hints.yaml lists which test runs which hint.
"""

import re
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from tests.lab.bench import until
from tests.lab.lacking import QEMU, Scene, defined, scene, undone
from tests.support.following import take
from tests.support.hint_inventory import PLACEHOLDER, commands, inventory
from tests.support.hint_situations import situations

OUT_AND_HALT = bytes.fromhex("ba0505b001eef4ebfd")
"""mov dx, 0x505; mov al, 1; out dx, al: QEMU's pvpanic device takes it for a panic. Then halt."""
HALT = bytes.fromhex("f4ebfd")


def sector(code: bytes) -> bytes:
    return code.ljust(510, b"\0") + b"\x55\xaa"


def state(scene: Scene, at: str = "alpha", name: str | None = None) -> str:
    return scene.on(at, "virsh", "domstate", name or scene.name).strip()


def other(scene: Scene, name: str, uuid: str) -> str:
    """The definition of another guest."""
    return (
        f"<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>"
        "<os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>"
        f"<devices><emulator>{QEMU}</emulator></devices></domain>"
    )


def uuid_of(scene: Scene) -> str:
    return scene.on("alpha", "virsh", "domuuid", scene.name).strip()


def test_a_guest_that_is_off_or_paused_runs_after_the_hint(scene: Scene) -> None:
    defined(scene, "alpha", other(scene, scene.name, str(uuid4())))
    try:
        scene.run_hint()
        assert state(scene) == "running"
        assert scene.blockers() == []
        scene.on("alpha", "virsh", "suspend", scene.name)
        scene.run_hint()
        assert scene.blockers() == []
    finally:
        undone(scene, ("destroy", scene.name), ("undefine", scene.name))


def test_a_guest_whose_kernel_panicked_runs_again_after_the_hint(scene: Scene) -> None:
    image = scene.bench.plan.shared / f"{scene.name}.raw"
    image.write_bytes(sector(OUT_AND_HALT).ljust(1 << 20, b"\0"))
    scene.start(
        "<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
        f"<source file='{image}'/><target dev='vda' bus='virtio'/></disk><panic model='isa'/>",
        top="<on_crash>preserve</on_crash>",
    )
    until(lambda: state(scene) == "crashed")
    with image.open("r+b") as now:
        now.write(sector(HALT))
    scene.run_hint()
    assert state(scene) == "running"
    assert scene.blockers() == []


def test_another_guest_with_the_name_is_renamed_on_the_target(scene: Scene) -> None:
    scene.start()
    defined(scene, "beta", other(scene, scene.name, str(uuid4())))
    try:
        scene.run_hint(NEW=f"{scene.name}-2")
        assert scene.blockers() == []
    finally:
        undone(scene, ("undefine", f"{scene.name}-2"), ("undefine", scene.name))


@pytest.mark.parametrize("runs", [False, True])
def test_another_guest_with_the_uuid_is_removed_once_it_is_known_to_be_wrong(
    scene: Scene, runs: bool
) -> None:
    scene.start()
    name = f"{scene.name}-2"
    defined(scene, "beta", other(scene, name, uuid_of(scene)))
    try:
        if runs:
            scene.on("beta", "virsh", "start", name)
        scene.run_hint()
        assert scene.blockers() == []
        assert name not in scene.on("beta", "virsh", "list", "--all", "--name").split()
    finally:
        undone(scene, ("destroy", name), ("undefine", name))


def test_a_paused_guest_with_the_uuid_may_be_a_standby_as_status_tells(scene: Scene) -> None:
    scene.start()
    name = f"{scene.name}-2"
    defined(scene, "beta", other(scene, name, uuid_of(scene)))
    try:
        scene.on("beta", "virsh", "start", name, "--paused")
        hint = scene.hint()
        first, rest = hint.split("; if not, ")
        (status,) = take(f"{first}; if not, x")
        assert "is not protected" in scene.bench.run(*status.words[1:]).err  # so it is no standby
        scene.bench.follow(rest, at="beta")
        assert scene.blockers() == []
    finally:
        undone(scene, ("destroy", name), ("undefine", name))


def test_internal_and_external_snapshots_are_deleted_as_the_hint_says(scene: Scene) -> None:
    image = scene.start_with_image()
    scene.on("alpha", "virsh", "snapshot-create-as", scene.name, "within")
    scene.run_hint(SNAPSHOT="within")
    assert scene.blockers() == []
    overlay = f"{image}.overlay"
    scene.on("alpha", "virsh", "snapshot-create-as", scene.name, "beside", "--disk-only",
             "--diskspec", f"vda,file={overlay}")  # fmt: skip
    assert "add --metadata to keep the overlays of an external snapshot" in scene.hint()
    scene.on("alpha", "virsh", "snapshot-delete", scene.name, "beside", "--metadata")
    assert scene.blockers() == []
    assert Path(overlay).exists()


def test_a_job_of_another_tool_is_aborted_as_the_hint_says(scene: Scene) -> None:
    image = scene.bench.plan.shared / f"{scene.name}.raw"
    copy = scene.bench.plan.shared / f"{scene.name}.raw.copy"
    scene.on("alpha", "truncate", "-s", "64M", str(image))
    scene.start(
        "<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
        f"<source file='{image}'/><target dev='vda' bus='virtio'/></disk>"
    )
    scene.on("alpha", "virsh", "blockcopy", scene.name, "vda", str(copy), "--transient-job",
             "--wait")  # fmt: skip
    scene.run_hint(only="blockjob", DISK="vda")
    assert scene.blockers() == []
    backup = "<domainbackup mode='pull'><server transport='unix' socket='{}'/></domainbackup>"
    path = scene.put("alpha", "backup.xml", backup.format(scene.folder / "nbd"))
    scene.on("alpha", "chmod", "777", str(scene.folder))
    scene.on("alpha", "virsh", "backup-begin", scene.name, path)
    scene.run_hint(only="domjobabort", DISK="vda")
    assert scene.blockers() == []


def test_a_network_is_defined_and_started_on_the_target(scene: Scene) -> None:
    bridge = re.search(r"\bname (\S+)|\d+: (\S+?)[:@]", scene.on(
        "alpha", "ip", "-o", "link", "show", "type", "bridge"))  # fmt: skip
    assert bridge is not None
    network = (
        f"<network><name>{scene.name}</name><forward mode='bridge'/>"
        f"<bridge name='{bridge[1] or bridge[2]}'/></network>"
    )
    try:
        defined(scene, "alpha", network)
        scene.on("alpha", "virsh", "net-start", scene.name)
        scene.start(
            f"<interface type='network'><source network='{scene.name}'/><model type='virtio'/>"
            "</interface>"
        )
        path = scene.bench.plan.shared / f"{scene.name}.raw.network"
        path.write_text(scene.on("alpha", "virsh", "net-dumpxml", scene.name))
        scene.run_hint(FILE=str(path))
        assert scene.blockers() == []
    finally:
        undone(scene, ("destroy", scene.name), ("net-destroy", scene.name),
               ("net-undefine", scene.name))  # fmt: skip


def test_a_new_volume_is_seen_after_the_pool_was_read_again(scene: Scene) -> None:
    shared = scene.bench.plan.shared / scene.name
    shared.mkdir()
    try:
        for at in ("alpha", "beta"):
            scene.on(at, "virsh", "pool-define-as", scene.name, "dir", "--target", str(shared))
            scene.on(at, "virsh", "pool-start", scene.name)
        scene.on("alpha", "virsh", "vol-create-as", scene.name, "v.raw", "1M", "--format", "raw")
        scene.start(
            "<disk type='volume' device='disk'><driver name='qemu' type='raw'/>"
            f"<source pool='{scene.name}' volume='v.raw'/><target dev='vda' bus='virtio'/></disk>"
        )
        scene.run_hint()
        assert scene.blockers() == []
    finally:
        undone(scene, ("destroy", scene.name), ("pool-destroy", scene.name),
               ("pool-undefine", scene.name))  # fmt: skip
        (shared / "v.raw").unlink(missing_ok=True)
        shared.rmdir()


def test_a_host_leaves_maintenance_and_takes_guests_again(scene: Scene) -> None:
    scene.start()
    scene.bench.good("maintenance", "enter", "beta")
    try:
        scene.run_hint()
        assert scene.blockers() == []
    finally:
        scene.bench.run("maintenance", "leave", "beta")


def test_a_guest_that_is_not_there_is_found_in_the_list(scene: Scene) -> None:
    scene.start()
    done = scene.bench.run("migrate", scene.name, "--to", "alpha", "--from", "beta", "--dry-run",
                           "--json")  # fmt: skip
    (found,) = [one for one in done.json["findings"] if one["code"] == "guest-unknown"]
    assert re.search(rf"{scene.name}\s.*alpha|alpha.*{scene.name}",
                     scene.bench.follow(found["hint"]))  # fmt: skip


def test_virsh_has_the_commands_and_options_of_all_hints() -> None:
    aside = set(situations().not_hints)
    bad = [
        (text, str(one), why)
        for text in inventory()
        if text not in aside
        for one in commands(text)
        if (why := lacking(list(one.words))) is not None
    ]
    assert bad == []


def lacking(words: list[str]) -> str | None:
    """What virsh does not know of a command, or lacks."""
    if words[0] != "virsh":
        return None
    words = words[3:] if words[1] == "-c" else words[1:]
    asked = subprocess.run(("virsh", "help", words[0]), capture_output=True, text=True, check=False)
    if asked.returncode:
        return "no such command"
    synopsis = re.search(r"SYNOPSIS\n\s+\S+(.*)", asked.stdout)
    assert synopsis is not None
    required, optional = synopsis[1], re.compile(r"\[[^][]*\]")
    while optional.search(required):  # a list of optional arguments has brackets within brackets
        required = optional.sub("", required)
    options = {one for one in words if one.startswith("--") and PLACEHOLDER not in one}
    known = set(re.findall(r"--[a-z-]+", asked.stdout))
    given = [one for one in words[1:] if not one.startswith("-")]
    if options - known:
        return f"no option {options - known}"
    return "an argument" if len(given) < len(re.findall("<", required)) else None


def test_what_virsh_does_not_know_is_found() -> None:
    assert lacking(["virsh", "start"]) == "an argument"
    assert lacking(["virsh", "strat", "web1"]) == "no such command"
    assert lacking(["virsh", "start", "web1", "--no-such"]) == "no option {'--no-such'}"
    assert lacking(["virsh", "domfsthaw", "web1"]) is None
    assert lacking(["virsh", "start", "web1"]) is None


__all__ = ["scene"]
