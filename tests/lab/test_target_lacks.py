"""What only the source has is a blocker before a migration, and the hints remove it.

Each guest is started by the source's libvirt with something that the target lacks. No attempt to
migrate it is started. Where the hint is a command, the command is run, and the guest can move.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tests.lab.bench import Bench
from tests.lab.lacking import QEMU, Scene, scene
from vmckpt_lab import host


def _serial_folder(scene: Scene) -> None:
    scene.on("alpha", "mkdir", str(scene.folder / "log"))
    scene.start(f"<serial type='file'><source path='{scene.folder}/log/a'/></serial>")


def _log(scene: Scene) -> None:
    scene.on("alpha", "mkdir", str(scene.folder / "log"))
    scene.start(f"<serial type='pty'><log file='{scene.folder}/log/a'/></serial>")


def _fw_cfg(scene: Scene) -> None:
    path = scene.put("alpha", "blob")
    scene.start(top=f"<sysinfo type='fwcfg'><entry name='opt/a/b' file='{path}'/></sysinfo>")


def _rom(scene: Scene) -> None:
    path = scene.put("alpha", "rom", "x" * 1024)
    scene.start(
        "<interface type='user'><mac address='52:54:00:00:00:09'/><model type='virtio'/>"
        f"<rom bar='on' file='{path}'/></interface>"
    )


def _emulator(scene: Scene) -> None:
    path = str(scene.folder / "qemu")
    scene.on("alpha", "ln", "-s", QEMU, path)
    scene.start(emulator=path)


def _pipe(scene: Scene) -> None:
    path = str(scene.folder / "pipe")
    scene.on("alpha", "mkfifo", path)
    scene.start(f"<serial type='pipe'><source path='{path}'/></serial>")


def _missing_disk(scene: Scene) -> None:
    path = str(scene.folder / "a.img")
    scene.on("alpha", "truncate", "-s", "1M", path)
    scene.start(
        f"<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{path}'/>"
        "<target dev='vda'/><readonly/></disk>"
    )


def _cd(scene: Scene) -> None:
    path = str(scene.folder / "a.iso")
    scene.on("alpha", "truncate", "-s", "1M", path)
    scene.start(
        "<disk type='file' device='cdrom'><driver name='qemu' type='raw'/>"
        f"<source file='{path}'/><target dev='sda' bus='sata'/><readonly/></disk>"
    )


def _address(scene: Scene) -> None:
    own = scene.bench.plan.host("alpha").address
    scene.start(f"<graphics type='vnc' listen='{own}'/>")


def _transient(scene: Scene) -> None:
    path = scene.bench.plan.shared / f"{scene.name}.raw"
    scene.on("alpha", "truncate", "-s", "1M", str(path))
    scene.start(
        "<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
        f"<source file='{path}'/><target dev='vda' bus='virtio'/><transient/></disk>"
    )


def _shmem(scene: Scene) -> None:
    scene.start(
        f"<shmem name='{scene.name}' role='peer'><model type='ivshmem-plain'/>"
        "<size unit='M'>1</size></shmem>"
    )


def _pool(scene: Scene) -> None:
    """A pool on a shared directory that only alpha has."""
    shared = scene.bench.plan.shared / scene.name
    shared.mkdir()
    for command in (
        ("pool-define-as", scene.name, "dir", "--target", str(shared)),
        ("pool-start", scene.name), ("vol-create-as", scene.name, "v.raw", "1M", "--format", "raw"),
    ):  # fmt: skip
        scene.on("alpha", "virsh", *command)
    scene.start(_volume(scene.name))


def _volume(pool: str) -> str:
    return (
        "<disk type='volume' device='disk'><driver name='qemu' type='raw'/>"
        f"<source pool='{pool}' volume='v.raw'/><target dev='vda' bus='virtio'/></disk>"
    )


LACKING: dict[str, tuple[Callable[[Scene], None], bool]] = {
    "directory-missing": (_serial_folder, True),
    "directory-missing of a log": (_log, True),
    "file-missing of firmware configuration": (_fw_cfg, False),
    "file-missing of a ROM": (_rom, False),
    "file-missing of QEMU": (_emulator, False),
    "file-missing of a pipe": (_pipe, False),
    "storage-not-visible of a disk": (_missing_disk, False),
    "storage-not-visible of a CD": (_cd, True),
    "address-missing": (_address, False),
    "disk-transient": (_transient, False),
    "shmem": (_shmem, False),
}


@pytest.mark.parametrize("code", LACKING)
def test_what_the_target_lacks_is_said_before_an_attempt_with_a_hint_that_helps(
    code: str, scene: Scene
) -> None:
    start, has_command = LACKING[code]
    start(scene)
    found = scene.blockers()

    assert [one["code"] for one in found] == [code.split(maxsplit=1)[0]]
    assert found[0]["hint"]
    refused = scene.bench.run("migrate", scene.name, "--to", "beta", "--json")
    assert (refused.code, refused.json["attempts"]) == (21, 1)
    assert refused.json["total_ms"] in (None, 0)
    if has_command:
        scene.run_hint()
        assert scene.blockers() == []


def test_a_snapshot_of_what_qemu_cannot_save_is_refused_at_once(scene: Scene, kept: Bench) -> None:
    _shmem(scene)
    done = kept.run("snapshot", "create", scene.name)
    assert (done.code, "without role='master'" in done.err) == (51, True), done.err
    assert "--no-memory" in done.err
    protect = kept.run("protect", scene.name, "--to", "beta", "--dry-run")
    assert "its shmem device has state that cannot be replicated" in protect.err


def test_checkpoints_of_another_backup_tool_come_along(scene: Scene) -> None:
    scene.start_with_image()
    for name in ("tool.0", "tool.1"):
        scene.on("alpha", "virsh", "checkpoint-create-as", scene.name, name)
    warned = scene.bench.run("migrate", scene.name, "--to", "beta", "--dry-run", "--json").json
    assert "foreign-checkpoints" in [one["code"] for one in warned["findings"]]

    moved = scene.bench.good("migrate", scene.name, "--to", "beta", "--json").json
    listed = scene.on("beta", "virsh", "checkpoint-list", scene.name, "--name", "--topological")
    assert listed.split() == ["tool.0", "tool.1"], moved["warnings"]
    assert not [one for one in moved["warnings"] if "was not defined" in one]


def test_a_port_that_is_taken_there(scene: Scene) -> None:
    target = scene.bench.plan.host("beta")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listener = subprocess.Popen(
        host.enter(target, "python3", "-c", f"import socket, time; s = socket.create_server("
                   f"('0.0.0.0', {port})); print('on', flush=True); time.sleep(300)"),
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "on\n"
        scene.start(f"<graphics type='vnc' port='{port}' autoport='no' listen='0.0.0.0'/>")
        assert [one["code"] for one in scene.blockers()] == ["port-in-use"]
    finally:
        os.killpg(listener.pid, signal.SIGKILL)
        listener.wait()
        if listener.stdout is not None:
            listener.stdout.close()
    assert scene.blockers() == []


def test_a_pool_is_defined_started_and_read_again_as_the_hints_say(scene: Scene) -> None:
    shared = scene.bench.plan.shared / scene.name
    path = scene.bench.plan.shared / f"{scene.name}.pool"
    try:
        _pool(scene)
        (found,) = scene.blockers()
        assert found["code"] == "pool-missing"
        path.write_text(scene.on("alpha", "virsh", "pool-dumpxml", scene.name))
        scene.run_hint(FILE=str(path))
        assert scene.blockers() == []
        scene.on("beta", "virsh", "pool-destroy", scene.name)
        assert scene.hint() == f"run virsh pool-start {scene.name} on beta"
        scene.run_hint()
        assert scene.blockers() == []
        scene.bench.good("migrate", scene.name, "--to", "beta")
        assert scene.name in scene.on("beta", "virsh", "list", "--name").split()
    finally:
        for at in ("alpha", "beta"):
            for command in ("destroy", "pool-destroy", "pool-undefine"):
                subprocess.run(host.enter(scene.bench.plan.host(at), "virsh", command, scene.name),
                               capture_output=True, check=False)  # fmt: skip
        path.unlink(missing_ok=True)
        (shared / "v.raw").unlink(missing_ok=True)
        shared.rmdir()


def test_a_secret_that_is_missing_or_has_no_value(scene: Scene) -> None:
    image = scene.bench.plan.shared / f"{scene.name}.luks"
    uuid, key = str(uuid4()), scene.put("alpha", "key", "secret")
    _luks(image)
    xml = (
        f"<secret ephemeral='yes' private='no'><uuid>{uuid}</uuid>"
        f"<usage type='volume'><volume>{image}</volume></usage></secret>"
    )
    path = scene.bench.plan.shared / f"{scene.name}.secret"
    path.write_text(xml)
    try:
        scene.on("alpha", "virsh", "secret-define", str(path))
        scene.on("alpha", "virsh", "secret-set-value", uuid, "--file", key, "--plain")
        scene.start(
            "<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
            f"<source file='{image}'><encryption format='luks'>"
            f"<secret type='passphrase' uuid='{uuid}'/></encryption></source>"
            "<target dev='vda' bus='virtio'/></disk>"
        )
        (found,) = scene.blockers()
        assert (found["code"], uuid in found["text"]) == ("secret-missing", True)
        there = scene.put("beta", "key", "c2VjcmV0")  # as virsh secret-get-value prints it
        values = {"FILE": str(path), "UUID": uuid, "VALUE": there}
        scene.bench.follow(found["hint"], only="define", at="beta", **values)
        scene.run_hint(FILE=there)
        assert scene.blockers() == []
        scene.on("beta", "virsh", "secret-undefine", uuid)
        scene.run_hint(**values)
        assert scene.blockers() == []
    finally:
        for at in ("alpha", "beta"):
            for command, name in (("destroy", scene.name), ("secret-undefine", uuid)):
                subprocess.run(host.enter(scene.bench.plan.host(at), "virsh", command, name),
                               capture_output=True, check=False)  # fmt: skip
        path.unlink()
        image.unlink()


def _luks(image: Path) -> None:
    """Create an encrypted image. qemu-img fails at times, when its thread has used no CPU yet."""
    create = (
        "qemu-img", "create", "-q", "--object", "secret,id=s,data=secret", "-f", "luks", "-o",
        "key-secret=s", str(image), "1M",
    )  # fmt: skip
    said = "accurate CPU usage"
    for _ in range(20):
        if "accurate CPU usage" in said:
            said = subprocess.run(create, capture_output=True, text=True, check=False).stderr
    assert said == ""


def test_a_network_filter_that_only_the_source_has(scene: Scene) -> None:
    path = scene.bench.plan.shared / f"{scene.name}.filter"
    path.write_text(f"<filter name='{scene.name}' chain='root'/>")
    try:
        scene.on("alpha", "virsh", "nwfilter-define", str(path))
        scene.start(
            f"<interface type='bridge'><source bridge='{_bridge(scene)}'/><model type='virtio'/>"
            f"<filterref filter='{scene.name}'/></interface>"
        )
        assert [one["code"] for one in scene.blockers()] == ["nwfilter-missing"]
        scene.run_hint(FILE=str(path))
        assert scene.blockers() == []
    finally:
        for at in ("alpha", "beta"):
            for command in ("destroy", "nwfilter-undefine"):
                subprocess.run(host.enter(scene.bench.plan.host(at), "virsh", command, scene.name),
                               capture_output=True, check=False)  # fmt: skip
        path.unlink()


def _bridge(scene: Scene) -> str:
    links = json.loads(scene.on("alpha", "ip", "-j", "link", "show", "type", "bridge"))
    return str(links[0]["ifname"])


__all__ = ["scene"]
