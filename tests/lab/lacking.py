"""Guests of which the source has something that the target lacks."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from tests.lab.bench import Bench
from vmckpt_lab import host

_XML = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid>
<memory unit='MiB'>32</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>{top}
<devices><emulator>{emulator}</emulator>{devices}</devices></domain>"""
QEMU = "/usr/bin/qemu-system-x86_64"


@dataclass(frozen=True)
class Scene:
    """A lab, and a directory that is another one on each host."""

    bench: Bench
    folder: Path
    name: str

    def on(self, at: str, *words: str) -> str:
        return self.bench.inside(at, *words)

    def put(self, at: str, name: str, text: str = "x") -> str:
        """Write a file into the directory of one host."""
        path = str(self.folder / name)
        self.on(at, "sh", "-c", 'printf %s "$2" >"$1"', "sh", path, text)
        return path

    def start(self, devices: str = "", *, top: str = "", emulator: str = QEMU) -> None:
        xml = _XML.format(name=self.name, uuid=uuid4(), top=top, devices=devices,
                          emulator=emulator)  # fmt: skip
        path = self.bench.plan.shared / f"{self.name}.xml"
        path.write_text(xml)
        try:
            self.on("alpha", "virsh", "create", str(path))
        finally:
            path.unlink()

    def start_with_image(self) -> Path:
        """Start the guest with an empty qcow2 image that both hosts see."""
        image = self.bench.plan.shared / f"{self.name}.raw.qcow2"
        self.on("alpha", "qemu-img", "create", "-q", "-f", "qcow2", str(image), "1M")
        self.start(
            "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>"
            f"<source file='{image}'/><target dev='vda' bus='virtio'/></disk>"
        )
        return image

    def blockers(self) -> list[dict[str, str]]:
        done = self.bench.run("migrate", self.name, "--to", "beta", "--dry-run", "--json")
        assert done.code in (0, 21), done.err
        return [one for one in done.json["findings"] if one["severity"] == "blocker"]

    def hint(self) -> str:
        (only,) = self.blockers()
        return only["hint"]

    def run_hint(self, only: str = "", **values: str) -> None:
        """Run the commands of the hint, each on the host that it names, as an operator would."""
        (found,) = self.blockers()
        at = found["where"] if found["where"] in ("alpha", "beta") else "alpha"
        self.bench.follow(found["hint"], only=only, at=at, **values)


@pytest.fixture
def scene(bench: Bench) -> Iterator[Scene]:
    name = f"lacks-{uuid4().hex[:6]}"
    made = Scene(bench, bench.plan.private / name, name)
    for at in ("alpha", "beta"):
        made.on(at, "mkdir", "-p", str(made.folder))
        made.on(at, "chmod", "755", str(made.folder))
    yield made
    for at in ("alpha", "beta"):
        subprocess.run(host.enter(bench.plan.host(at), "virsh", "destroy", name),
                       capture_output=True, check=False)  # fmt: skip
        made.on(at, "rm", "-rf", str(made.folder))
    for image in bench.plan.shared.glob(f"{name}.raw*"):
        image.unlink()


def defined(scene: Scene, at: str, xml: str) -> None:
    """Define a guest, pool or network, by the kind of its XML."""
    kind = {"<dom": "define", "<net": "net-define", "<poo": "pool-define"}[xml[:4]]
    path = scene.bench.plan.shared / f"{scene.name}.definition"
    path.write_text(xml)
    try:
        scene.on(at, "virsh", kind, str(path))
    finally:
        path.unlink()


def undone(scene: Scene, *commands: tuple[str, str]) -> None:
    """Run virsh commands on both hosts, whether or not there is something to undo."""
    for at in ("alpha", "beta"):
        for command in commands:
            subprocess.run(host.enter(scene.bench.plan.host(at), "virsh", *command),
                           capture_output=True, check=False)  # fmt: skip
