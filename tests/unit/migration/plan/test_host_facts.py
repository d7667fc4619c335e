"""What preflight is told of two hosts, and what it is told when one of them says nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import GUEST, HOST, host_facts
from tests.support.shell import Shell
from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Answer, Resource
from vmckpt.errors import HostUnreachable, RemoteError
from vmckpt.hypervisor import domains, migration_source
from vmckpt.hypervisor import host_facts as hypervisor_facts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.migration_source import SourceAnswers
from vmckpt.journal import maintenance
from vmckpt.migration.plan import host_facts as plan_facts
from vmckpt.migration.plan import target_resources
from vmckpt.migration.plan.facts import Facts
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.migration.plan.target_resources import TargetAnswers
from vmckpt.model.guest import Disk, Guest
from vmckpt.model.host import Host, HostFacts
from vmckpt.remote import probe

KERNEL = Resource(kind=Kind.FILE, name="/boot/none")
PORT = Resource(kind=Kind.PORT, name="1")
BETA = replace(HOST, name="beta", uri="qemu+tcp://beta/system")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Hosts that do not answer; the others do, and alpha has the guest."""
    names: set[str] = set()

    def asked(one: Hypervisor) -> None:
        if one.host.name in names:
            raise HostUnreachable(f"{one.host.name}: no route", host=one.host.name)

    async def find_guest(one: Hypervisor, _name: str) -> Guest:
        asked(one)
        return GUEST

    async def facts(one: Hypervisor) -> HostFacts:
        asked(one)
        return host_facts(one.host.name)

    async def fits(*_: object) -> bool:
        return True

    async def ask_source(*_: object) -> SourceAnswers:
        return SourceAnswers(xml="<domain/>", needs=(KERNEL, PORT), blocked=("why",))

    async def ask_libvirt(*_: object) -> TargetAnswers:
        return TargetAnswers(refused="no")

    monkeypatch.setattr(migration_source, "ask_source", ask_source)
    monkeypatch.setattr(target_resources, "ask_libvirt", ask_libvirt)
    monkeypatch.setattr(domains, "find_guest", find_guest)
    monkeypatch.setattr(hypervisor_facts, "host_facts", facts)
    monkeypatch.setattr(hypervisor_facts, "cpu_fits", fits)
    monkeypatch.setattr(maintenance, "closed", lambda _host: None)
    return names


async def gathered(remotes: Remotes | None = None, target: Host = BETA) -> Facts:
    return await plan_facts.gather(Hypervisor(HOST), Hypervisor(target), "web1", remotes)


async def test_of_hosts_that_answer_all_is_told(silent: set[str]) -> None:
    assert silent == set()
    found = await gathered()

    assert (found.guest, found.cpu_fits) == (GUEST, True)
    assert (found.source_error, found.target_error, found.ssh_errors) == (None, None, ())
    assert found.target_facts == host_facts("beta")
    assert not found.post_copy_asked
    assert (found.needs, found.blocked, found.refused) == ((KERNEL, PORT), ("why",), "no")
    assert found.answers == {}


@pytest.mark.parametrize("name", ["alpha", "beta"])
async def test_a_host_that_is_silent_is_named_and_nothing_raised(
    silent: set[str], name: str
) -> None:
    silent.add(name)
    found = await gathered()

    errors = {"alpha": found.source_error, "beta": found.target_error}
    assert [one for one, error in errors.items() if error is not None] == [name]
    assert "no route" in (errors[name] or "")
    assert found.cpu_fits is None
    assert (found.guest is None) is (name == "alpha")


async def test_a_target_whose_address_names_no_host_is_told_without_ssh(silent: set[str]) -> None:
    assert silent == set()
    found = await gathered(target=replace(BETA, uri="qemu:///system"))

    assert found.peer_login_error == "qemu:///system has no host name; set peer_uri of beta"


async def test_files_and_links_are_looked_for_over_ssh(
    silent: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert silent == set()
    remotes: Remotes = (Shell(tmp_path), Shell(tmp_path))

    async def answer(*_: Any) -> None:
        return None

    async def post_copy(_: object) -> tuple[str, str]:
        return "by root only", "/dev/shm"

    monkeypatch.setattr(probe, "peer_login", answer)
    monkeypatch.setattr(probe, "post_copy", post_copy)
    found = await gathered(remotes)

    assert "lo" in (found.target_links or ())
    assert found.on_target == {"/srv/web1.raw": False, "/boot/none": False}
    assert found.answers == {KERNEL: Answer.ABSENT, PORT: Answer.PRESENT}
    assert (found.post_copy_error, found.memory_folder) == ("by root only", "/dev/shm")
    assert found.post_copy_asked

    async def broken(*_: Any) -> None:
        raise RemoteError("beta: no ssh")

    monkeypatch.setattr(probe, "links", broken)
    assert (await gathered(remotes)).ssh_errors == ("beta: no ssh",)


async def test_logins_are_those_given_or_none_where_a_host_has_no_address(tmp_path: Path) -> None:
    given: Remotes = (Shell(tmp_path), Shell(tmp_path))
    here, there = Hypervisor(HOST), Hypervisor(replace(BETA, ssh=None))

    async with plan_facts.logins(here, there, given) as found:
        assert found is given
    async with plan_facts.logins(here, there) as found:
        assert found is None
    async with plan_facts.logins(here, here) as found:
        assert found is None


VOLUME = replace(GUEST.disks[0], kind="volume", source="v.img")


def test_a_volume_is_compared_by_its_path_where_both_hosts_give_it_the_same() -> None:
    def of(there: dict[str, str], path: str = "/srv/v.img") -> Disk:
        source = SourceAnswers(xml="", volumes={"vda": path}, data_files={"vda": "/d"})
        whole = replace(GUEST, disks=(VOLUME,))
        return plan_facts.completed(whole, source, there).disks[0]

    same = replace(VOLUME, source="/srv/v.img", data_file="/d")
    assert of({"vda": "/srv/v.img"}) == replace(same, kind="file")
    assert of({}) == replace(VOLUME, data_file="/d")
    assert of({"vda": "/mnt/v.img"}) == replace(VOLUME, data_file="/d")
    assert of({"vda": "/dev/vg/v"}, "/dev/vg/v").kind == "block"
