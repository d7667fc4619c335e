"""One host under two names in the inventory, and two hosts with one libvirt host UUID."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.bench import Bench, codes, migrate
from vmckpt_lab.faults import inject

ONE_HOST = "alpha and alpha2 are one host"
CONFIG = "/etc/libvirt/libvirtd.conf"


@pytest.fixture
def twice(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The inventory has alpha once more, by another URI of the same libvirtd."""
    text = bench.plan.inventory.read_text()
    alpha = text.partition("  alpha:\n")[2].partition("  beta:\n")[0]
    path = bench.plan.folder / "twice.yaml"
    again = alpha.replace("/system", "/system?no_verify=1", 1)
    path.write_text(text.replace("  beta:\n", f"  alpha2:\n{again}  beta:\n", 1))
    monkeypatch.setattr(Bench, "environment", property(lambda self: environment(self, path)))
    yield
    path.unlink()


def environment(bench: Bench, inventory: Path) -> dict[str, str]:
    state = str(bench.plan.folder / "state")
    return {**os.environ, "VMCKPT_INVENTORY": str(inventory), "VMCKPT_STATE": state}


@pytest.mark.usefixtures("twice")
def test_one_host_under_two_names_is_said_first(bench: Bench) -> None:
    bench.guest()
    refused = (
        ("migrate", "web1", "--to", "beta"),
        ("migrate", "web1", "--to", "alpha2"),
        ("migrate", "web1", "--from", "alpha", "--to", "alpha2"),
        ("plan", "web1", "--to", "beta"),
        ("evacuate", "alpha", "--dry-run"),
        ("evacuate", "beta", "--dry-run"),
        ("snapshot", "create", "web1", "--name", "s1"),
        ("protect", "web1", "--to", "beta", "--dry-run"),
        ("prepare", "web1", "--dry-run"),
        ("label", "web1", "tier=web"),
        ("policy", "explain", "web1"),
    )
    for command in refused:
        done = bench.run(*command)
        assert done.code == 3, (command, done.err)
        assert f"error: {ONE_HOST}; nothing was changed; leave alpha or alpha2 out" in done.err
        assert "destroy" not in done.out + done.err

    listed = bench.good("guests")
    assert ONE_HOST in listed.err
    assert listed.out.count("web1") == 1
    assert ONE_HOST in bench.good("hosts").err
    assert ONE_HOST in bench.run("doctor", "--json").out
    assert bench.good("recover").code == 0
    assert bench.inside("alpha", "virsh", "domstate", "web1").strip() == "running"


@pytest.fixture
def cloned(bench: Bench) -> Iterator[None]:
    """beta's libvirtd has alpha's host UUID, as after a clone."""
    own, other = (
        bench.inside(name, "grep", "^host_uuid", CONFIG).strip() for name in ("beta", "alpha")
    )
    _set(bench, own, other)
    yield
    _set(bench, other, own)


def _set(bench: Bench, old: str, new: str) -> None:
    bench.inside("beta", "sed", "-i", f"s/^{old}$/{new}/", CONFIG)
    os.kill(inject.libvirtd(bench.plan, "beta"), signal.SIGKILL)
    inject.start_libvirtd(bench.plan, "beta")


@pytest.mark.usefixtures("cloned")
def test_cloned_hosts_are_two_hosts(bench: Bench) -> None:
    bench.guest()
    done = migrate(bench)
    assert (done.code, codes(done)) == (21, ["same-libvirt"]), done.err

    told = {one["code"]: one["text"] for one in bench.run("doctor", "--json").json}
    assert "one-host" not in told
    assert told["same-libvirt"].startswith(
        "alpha and beta have the same libvirt host UUID, but are two hosts: their host names are"
    )
    assert "are two hosts" in bench.good("hosts").err
    assert ONE_HOST not in bench.good("guests").err
    planned = bench.run("evacuate", "alpha", "--dry-run", "--json").json
    assert "same libvirt host UUID" in planned["left"][0]["why"]
