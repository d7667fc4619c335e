"""Debian guests as virt-install defines them: started, verified, and failed over by power-off."""

import json
import os
from collections.abc import Iterator

import pytest

from bench.debian_failover import PowerCuts
from tests.lab.bench import Bench, until
from tests.lab.protecting import TTL, lab_with_witness
from vmckpt_lab import guests
from vmckpt_lab.debian import guest as debian

pytestmark = pytest.mark.long


@pytest.fixture
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"db{os.getpid()}") as made:
        yield made


def test_no_commit_is_lost_when_the_host_loses_its_power(witnessed: Bench) -> None:
    cuts = PowerCuts(witnessed.plan, seed=33, ttl=TTL)
    for _ in range(3):
        told = cuts.turn()
        assert told["ledgers_whole"], told
        assert "took over the lease" in told["why"]


def test_a_guest_with_firmware_a_tpm_and_two_cards_boots_and_goes(bench: Bench) -> None:
    words = ("--on", "alpha", "--name", bench.plan.name, "--os", "debian")
    bench.good("lab", "guest", "db1", *words, "--uefi", "--tpm", "--nics", "2")
    xml = bench.inside("alpha", "virsh", "dumpxml", "db1")
    for sign in ("q35", "OVMF", "<nvram", "tpm-crb", "org.qemu.guest_agent.0", "pcie-root-port"):
        assert sign in xml, sign
    assert xml.count("<interface ") == 2
    cards = bench.inside("alpha", "virsh", "domifaddr", "db1", "--source", "agent")
    known = guests.find(bench.plan, "db1")
    assert all(one in cards for one in (known.address, *known.more_addresses))
    assert "intact commits" in bench.good("lab", "verify", "db1", "--name", bench.plan.name).out
    bench.good("lab", "remove", "db1", "--name", bench.plan.name)
    assert not guests.commits_file(bench.plan, "db1").exists()
    assert not list(bench.plan.shared.glob("db1.*"))
    assert bench.where("db1") == []


def test_a_commit_that_is_gone_is_found(bench: Bench) -> None:
    guest = debian.start(bench.plan, "db1", "alpha", disk_format="raw")
    assert debian.audit(bench.plan, guest).whole
    words = ["postgres", "-c", "psql -c 'delete from commits where number = 2'"]
    forget = {"path": "/bin/su", "arg": words}
    text = json.dumps({"execute": "guest-exec", "arguments": forget})
    bench.inside("alpha", "virsh", "qemu-agent-command", "db1", text)
    until(lambda: not debian.audit(bench.plan, guest).whole)
    (commits, *others) = debian.audit(bench.plan, guest).entries
    assert not commits.whole
    assert "1 of them missing (2)" in commits.text
    assert all(one.whole for one in others)
