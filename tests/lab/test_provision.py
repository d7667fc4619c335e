"""Vagrant's provisioning, in hosts of the lab, as far as namespaces go."""

import shlex
import shutil
from pathlib import Path

import pytest

from tests.lab.bench import Bench
from tests.support.paths import ROOT
from vmckpt import inventory

HERE = ROOT / "vagrant/provision"
NAMES = ("alpha", "beta", "gamma")
HIDDEN = ("/opt", "/etc/systemd/system", "/usr/local/bin", "/var/cache/vmckpt")
KEPT = ("/etc/hosts", "/etc/libvirt/qemu.conf", "/etc/fstab")


def provision(bench: Bench, host: str, script: str, *words: str) -> str:
    line = shlex.join(["bash", str(HERE / script), "77", *words])
    told = f"VMCKPT_SOURCE={ROOT} VMCKPT_REHEARSAL=1 {line}"
    return bench.inside(host, "bash", "-c", told)


@pytest.mark.long
def test_a_host_is_made_and_made_again(bench: Bench) -> None:
    first = provision(bench, "alpha", "host.sh", "11", *NAMES)
    assert first.strip().endswith("is a host at 198.18.77.11")
    texts = {file: bench.inside("alpha", "cat", file) for file in KEPT}
    assert "198.18.77.12 beta" in texts["/etc/hosts"]
    assert 'migration_address = "198.18.77.11"' in texts["/etc/libvirt/qemu.conf"]
    assert texts["/etc/fstab"].count("nfs4") == 2

    provision(bench, "alpha", "host.sh", "11", *NAMES)
    assert {file: bench.inside("alpha", "cat", file) for file in KEPT} == texts


@pytest.mark.long
def test_a_controller_knows_its_hosts_and_keeps_its_keys(bench: Bench) -> None:
    # What it makes outside of the host's own folders goes into folders that are gone afterwards.
    for folder in HIDDEN:
        bench.inside("beta", "mkdir", "-p", folder)
        bench.inside("beta", "mount", "-t", "tmpfs", "tmpfs", folder)
    bench.inside("beta", "mkdir", "-p", "/run/vagrant-lab")
    bench.inside("beta", "mkdir", "-p", "/var/lib/vmckpt/labs/vagrant")
    try:
        bench.inside("beta", "mount", "--bind", "/run/vagrant-lab", "/var/lib/vmckpt/labs/vagrant")
        provision(bench, "beta", "controller.sh", *NAMES)
        key = bench.inside("beta", "cat", "/root/.ssh/id_ed25519")
        provision(bench, "beta", "controller.sh", *NAMES)
        assert bench.inside("beta", "cat", "/root/.ssh/id_ed25519") == key
        known = inventory.parse(bench.inside("beta", "cat", "/etc/vmckpt/hosts.yaml"), Path("h"))
        exports = bench.inside("beta", "cat", "/etc/exports")
    finally:
        # Other tests use this host, and its guests' kernel lies in one of them.
        bench.inside("beta", "umount", "--lazy", *HIDDEN)
        bench.inside("beta", "umount", "/var/lib/vmckpt/labs/vagrant")
        shutil.rmtree("/var/lib/vmckpt/labs/vagrant")

    assert [(one.name, one.migration_address) for one in known.hosts.values()] == [
        (name, f"198.18.77.{11 + number}") for number, name in enumerate(NAMES)
    ]
    assert list(known.stores) == ["near"]
    assert exports.count("/var/cache/vmckpt 198.18.77.0/24(ro") == 1
