"""A guest made ready for snapshots and replication: by a restart, and by new network cards."""

import asyncio
import json
import signal
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.lab.bench import WHOLE, Bench, Done, until, uuid
from tests.support.paths import ROOT
from vmckpt.agent import client
from vmckpt.agent.orders import CardsOrder
from vmckpt.capture.network_cards import CardReport
from vmckpt.capture.prepare_domain import Prepared, prepare
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.domains import Definition
from vmckpt.model.finding import Severity
from vmckpt_lab import guests, host
from vmckpt_lab.debian import commits, definition
from vmckpt_lab.debian import guest as debian
from vmckpt_lab.plan import GUEST_BRIDGE


def looked(bench: Bench) -> tuple[Definition, Prepared]:
    known = uuid(bench)
    found = bench.ask("alpha", lambda hypervisor: domains.stored_definition(hypervisor, known))
    return found, prepare(found.text, found.running, found.disks)


@pytest.mark.long
def test_a_guest_is_prepared_by_a_definition_and_a_restart(bench: Bench) -> None:
    bench.guest(memory="128MiB", dirty="4MiB@1MiB/s", disk="8MiB", disk_format="qcow2")
    known = uuid(bench)
    before, wanted = looked(bench)
    xml = wanted.xml
    assert xml is not None
    assert wanted.restart
    bench.ask(
        "alpha",
        lambda hypervisor: domains.write(hypervisor, known, xml, instead_of=before.text),
    )
    with pytest.raises(HypervisorError, match="has changed in the meantime"):
        bench.ask(
            "alpha",
            lambda hypervisor: domains.write(hypervisor, known, xml, instead_of=before.text),
        )
    _, waiting = looked(bench)
    assert (waiting.xml, waiting.restart) == (None, True)
    assert bench.ledgers() == WHOLE  # nothing has happened to the guest yet

    bench.inside("alpha", "virsh", "-q", "destroy", "web1")
    bench.inside("alpha", "virsh", "-q", "start", "web1")
    after, found = looked(bench)
    assert (found.xml, found.restart) == (None, False)
    assert {finding.severity for finding in found.findings} <= {Severity.OK, Severity.INFO}
    assert after.running is not None
    source = after.running.find("memoryBacking/source")
    assert source is not None
    assert source.get("type") == "file"
    until(lambda: bench.seen().runs == 2)


MAC = "52:54:00:aa:00:07"
QUEUES = f"""<interface type='bridge'><mac address='{MAC}'/><source bridge='{GUEST_BRIDGE}'/>
<target dev='second'/><model type='virtio'/><driver queues='2'/><link state='down'/>
<alias name='ua-second'/></interface>"""
"""A card that must be replaced. Under TCG, libvirt never uses vhost."""


def card(bench: Bench, *flags: str, mac: str = MAC) -> ET.Element | None:
    """A card of the guest: what libvirt says of it."""
    text = bench.inside("alpha", "virsh", "dumpxml", *flags, "web1")
    found = ET.fromstring(text).findall("devices/interface")
    return next((one for one in found if one.find(f"mac[@address='{mac}']") is not None), None)


def without_driver(one: ET.Element | None) -> str:
    """All about a card but its driver, and the name on the host if libvirt has chosen it."""
    assert one is not None
    target = one.find("target")
    if target is not None and target.get("dev", "").startswith("vnet"):
        one.remove(target)
    driver = one.find("driver")
    if driver is not None:
        one.remove(driver)
    return ET.canonicalize(ET.tostring(one, encoding="unicode"), strip_text=True)


def plugged_with_queues(bench: Bench) -> str:
    """Plug a card in, also into the definition; all about it but its driver."""
    file = bench.plan.shared / "card.xml"
    file.write_text(QUEUES)
    bench.inside("alpha", "virsh", "-q", "attach-device", "web1", str(file), "--live", "--config")
    file.unlink()
    return without_driver(card(bench))


def dies(bench: Bench, *words: str) -> list[str]:
    """The command of an agent that is killed when it has unplugged a card."""
    program = [sys.executable, "-m", "tests.lab.unplugging", *words]
    inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *program]
    return host.enter(bench.plan.host("alpha"), *inside)


def live(bench: Bench, *more: str) -> Done:
    return bench.run("prepare", "web1", "--live", "--json", *more)


def test_a_card_is_replaced_in_a_running_guest_whoever_is_killed(bench: Bench) -> None:
    bench.guest(memory="128MiB", dirty="4MiB@1MiB/s", disk="8MiB", boot=True)
    before = plugged_with_queues(bench)
    refused = bench.run("protect", "web1", "--to", "beta", "--dry-run")
    assert "ua-second has 2 queues" in refused.err
    assert "vmckpt prepare web1 --live" in refused.err

    (told,) = bench.good("prepare", "web1", "--live", "--dry-run", "--json").json["cards"]
    assert (told["card"], told["mac"], told["replaced"]) == ("ua-second", MAC, False)
    assert without_driver(card(bench)) == before

    # The agent is killed, without a job.
    order = CardsOrder(what="replace", guest=uuid(bench), uri=client.LIBVIRT, host="alpha")
    with subprocess.Popen(dies(bench, "agent"), stdin=subprocess.PIPE, text=True) as killed:
        assert killed.stdin is not None
        killed.stdin.write(json.dumps(order.as_json()) + "\n")
        killed.stdin.flush()  # and stays open: an agent without a controller unplugs nothing
        assert killed.wait(60) in (137, -signal.SIGKILL)
    assert card(bench) is None
    findings = bench.good("prepare", "web1", "--dry-run", "--json").json["findings"]
    assert "network-unplugged" in [one["code"] for one in findings]

    done = live(bench, "--yes")
    assert done.code == 0, done.err
    assert done.json["changed"]
    assert without_driver(card(bench)) == before
    for flags in ((), ("--inactive",)):
        found = card(bench, *flags)
        assert found is not None
        driver = found.find("driver")
        assert driver is None or "queues" not in driver.attrib
    assert live(bench, "--dry-run").json["cards"] == []
    assert bench.ledgers() == WHOLE  # its other card is not touched


def test_a_card_is_plugged_in_by_recovery(bench: Bench) -> None:
    """Both its agent and its controller are killed."""
    bench.guest(memory="128MiB", dirty="4MiB@1MiB/s", disk="8MiB", boot=True)
    before = plugged_with_queues(bench)
    killed = subprocess.run(
        [sys.executable, "-m", "tests.lab.unplugging", "controller", "web1", *dies(bench, "agent")],
        env=bench.environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert card(bench) is None
    told = bench.good("recover", "--dry-run").out
    assert "a network card of web1 was unplugged" in told
    assert card(bench) is None

    assert "plug the network card in again" in bench.good("recover").out
    assert without_driver(card(bench)) == before
    assert "prepare" not in bench.good("jobs").out
    assert live(bench, "--dry-run").json["cards"] == []
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_card_that_the_guest_does_not_release_is_plugged_in_after_its_reboot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest's kernel takes no part in hotplug. At a reset, QEMU takes the card away."""
    describe = guests.domain_xml

    def described(*known: Any) -> str:
        text = describe(*known).replace("<on_reboot>destroy</on_reboot>", "")
        return text.replace("</cmdline>", " acpiphp.disable=1</cmdline>")

    monkeypatch.setattr(guests, "domain_xml", described)
    bench.guest(memory="128MiB", dirty="4MiB@1MiB/s", disk="8MiB", boot=True)
    before = plugged_with_queues(bench)
    failed = live(bench, "--yes")
    assert failed.code == 10
    assert "did not release its network card ua-second" in failed.err
    assert without_driver(card(bench)) == before
    unsettled = bench.run("recover")
    assert unsettled.code == 13
    assert "may have been asked to release it" in unsettled.out
    assert bench.run("prepare", "web1", "--live", "--yes").code == 18

    bench.inside("alpha", "virsh", "-q", "reset", "web1")
    until(lambda: card(bench) is None)
    assert "plug the network card in again" in bench.good("recover").out
    assert without_driver(card(bench)) == before


@pytest.mark.long
def test_the_guest_agent_confirms_a_new_card_and_clients_go_on(bench: Bench) -> None:
    guest = debian.start(bench.plan, "web1", "alpha")
    mac = definition.mac(guest.address)
    before = without_driver(card(bench, mac=mac))
    order = CardsOrder(
        what="replace", guest=uuid(bench), uri=client.LIBVIRT, host="alpha", cards=(mac,)
    )
    told = asyncio.run(
        client.run_order(
            bench.inventory.host("alpha"), order.as_json(), lambda _: None, asyncio.Event()
        )
    )
    (report,) = map(CardReport.parse, told["cards"])
    sys.stderr.write(f"{report}\n")

    assert (report.addresses, report.confirmed) == ((f"{guest.address}/24",), True)
    now = card(bench, mac=mac)
    assert now is not None
    driver = now.find("driver")
    assert driver is not None
    assert driver.get("name") == "qemu"
    assert without_driver(now) == before
    file = guests.commits_file(bench.plan, "web1")
    known = len(commits.acknowledged(file.read_text()))
    until(lambda: len(commits.acknowledged(file.read_text())) > known, limit=60)
    assert debian.audit(bench.plan, guest).whole
