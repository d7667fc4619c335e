"""Guests as virt-install and virt-manager define them move, or everything in the way is listed."""

import subprocess
from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.lab.bench import Bench
from tests.lab.pools import HOSTS, shared_pool
from vmckpt_lab import host
from vmckpt_lab.plan import GUEST_BRIDGE

pytestmark = pytest.mark.long

POOL = "images"
# virt-manager, like virt-install, takes its defaults from the guest's operating system.
_MANAGER = (
    "--os-variant", "debian11", "--memory", "128", "--vcpus", "2", "--graphics", "spice",
    "--sound", "ich9", "--channel", "spicevmc", "--redirdev", "usb", "--redirdev", "usb",
    "--video", "virtio", "--rng", "/dev/urandom", "--console", "pty",
)  # fmt: skip


class Installing:
    """Runs virt-install on alpha, as an operator of that host does."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.name = bench, f"own-{uuid4().hex[:6]}"

    def install(self, *words: str) -> None:
        disk = self.bench.plan.shared / f"{self.name}.qcow2"
        program = (
            "virt-install", "--connect", "qemu:///system", "--virt-type", "qemu", "--import",
            "--noautoconsole", "--name", self.name, "--disk", f"path={disk},size=0.01",
            "--network", f"bridge={GUEST_BRIDGE}",
        )  # fmt: skip
        # The directory of the CD with cloud-init's data.
        self.bench.inside("alpha", "mkdir", "-p", "/var/lib/libvirt/boot")
        self.bench.inside("alpha", "env", f"HOME={self.bench.plan.private}", *program, *words)

    def blockers(self) -> list[dict[str, str]]:
        done = self.bench.run("migrate", self.name, "--to", "beta", "--dry-run", "--json")
        assert done.code in (0, 21), done.err
        return [one for one in done.json["findings"] if one["severity"] == "blocker"]

    def moves(self) -> None:
        done = self.bench.good("migrate", self.name, "--to", "beta", "--json").json
        assert (done["outcome"], done["attempts"]) == ("completed", 1)
        assert self.name in self.bench.inside("beta", "virsh", "list", "--name").split()


@pytest.fixture
def installing(bench: Bench) -> Iterator[Installing]:
    made = Installing(bench)
    with shared_pool(bench, POOL):
        yield made
        for at in HOSTS:
            for words in (("destroy", made.name), ("undefine", made.name, "--nvram")):
                entered = host.enter(bench.plan.host(at), "virsh", *words)
                subprocess.run(entered, capture_output=True, check=False)
    for path in bench.plan.shared.glob(f"{made.name}*"):
        path.unlink()


def test_a_guest_of_virt_install_with_everything_moves_after_what_was_listed_at_once(
    installing: Installing,
) -> None:
    bench, name = installing.bench, installing.name
    bench.inside("alpha", "virsh", "vol-create-as", POOL, f"{name}-data.raw", "4M")
    bench.inside("beta", "virsh", "pool-refresh", POOL)
    installing.install(
        "--osinfo", "debian11", "--memory", "256", "--boot", "uefi", "--cloud-init",
        "disable=on", "--tpm", "model=tpm-crb,backend.type=emulator",
        "--disk", f"vol={POOL}/{name}-data.raw,format=raw",
    )  # fmt: skip
    xml = bench.inside("alpha", "virsh", "dumpxml", name)
    for sign in ("<nvram", "<tpm", "data.raw", "cloudinit.iso", "machine='pc-q35"):
        assert sign in xml, sign

    found = installing.blockers()
    assert [one["code"] for one in found] == ["storage-not-visible"], found
    bench.follow(found[0]["hint"], at="alpha")
    installing.moves()


def test_a_guest_with_the_defaults_of_virt_manager_moves_at_the_first_attempt(
    installing: Installing,
) -> None:
    installing.install(*_MANAGER)
    assert installing.blockers() == []
    installing.moves()
