"""hosts, guests, doctor; connections and ssh keys."""

import asyncio
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench import Bench, until
from vmckpt.errors import HostKeyRefused, HostUnreachable, RemoteError
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.hypervisor.host_facts import host_facts
from vmckpt.model.host import Host, SshAddress
from vmckpt.remote.ssh import Remote
from vmckpt_lab import host as lab_host
from vmckpt_lab import network


@pytest.mark.parametrize(
    "form",
    [
        "qemu+tcp://{address}/system",
        "qemu+tls://{address}/system?pkipath={folder}/pki",
        "qemu+ssh://root@{address}/system?command={folder}/ssh/ssh&no_tty=1",
    ],
    ids=["tcp", "tls", "ssh"],
)
def test_a_host_is_reached_by_each_transport(bench: Bench, form: str) -> None:
    alpha = bench.plan.host("alpha")
    uri = form.format(address=alpha.address, folder=bench.plan.folder)

    async def ask() -> str:
        async with Hypervisor(Host(name="alpha", uri=uri)) as hypervisor:
            return (await host_facts(hypervisor)).uuid

    assert asyncio.run(ask()) == alpha.uuid


def test_hosts_and_guests_are_listed(bench: Bench) -> None:
    bench.guest("web1", "alpha")
    bench.guest("web2", "beta")

    assert [h["name"] for h in bench.good("hosts", "--json").json] == ["alpha", "beta"]
    seen = {g["name"]: (g["host"], g["state"]) for g in bench.good("guests", "--json").json}
    assert seen == {"web1": ("alpha", "running"), "web2": ("beta", "running")}
    assert "web2" in bench.good("guests").out


def test_doctor_finds_no_fault_that_keeps_lab_hosts_from_migrating(bench: Bench) -> None:
    found = bench.good("doctor", "--json").json

    assert not [f for f in found if f["severity"] == "blocker"]
    codes = {f["code"] for f in found}
    assert {
        "libvirt-version", "qemu-version", "accelerator", "migration-ports", "clock-skew",
        "post-copy", "certificate", "memory", "storage", "ssh", "shared-memory", "peer-login",
    } <= codes  # fmt: skip


def findings(bench: Bench, *args: str) -> dict[str, str]:
    return {f["code"]: f["severity"] for f in bench.run("doctor", "-q", "--json", *args).json}


@pytest.mark.long
def test_doctor_finds_a_host_that_is_cut_off(bench: Bench) -> None:
    network.cut(bench.plan, "beta")
    found = findings(bench, "beta")

    assert found["libvirt"] == found["ssh"] == "blocker"
    assert bench.run("doctor", "beta").code == 21


def test_doctor_finds_a_libvirtd_that_refuses_peers(bench: Bench) -> None:
    bench.inside("alpha", "sh", "-c", "echo 127.0.0.1 > /dev/null")
    text = bench.plan.inventory.read_text()
    wrong = text.replace("    migration_address", "    peer_uri: qemu+tcp://127.0.0.9/system\n"
                                                  "    migration_address")  # fmt: skip
    path = bench.plan.folder / "wrong.yaml"
    path.write_text(wrong)

    assert findings(bench, "alpha", "--inventory", str(path))["peer-login"] == "warning"


def test_doctor_finds_storage_that_is_missing_and_a_certificate_that_is_none(bench: Bench) -> None:
    etc = bench.plan.host("alpha").root / "etc/pki/qemu/server-cert.pem"
    good = etc.read_text()
    path = bench.plan.folder / "wrong.yaml"
    path.write_text(bench.plan.inventory.read_text().replace("storage: [", "storage: [/nowhere, "))
    etc.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    try:
        found = findings(bench, "alpha", "--inventory", str(path))
    finally:
        etc.write_text(good)

    assert found["certificate"] == found["storage"] == "warning"


def ssh_to(bench: Bench, **changes: Any) -> SshAddress:
    address = bench.inventory.host("alpha").ssh
    assert address is not None
    return replace(address, **changes)


def say_hello(where: SshAddress) -> str:
    async def hello() -> str:
        async with Remote(Host(name="alpha", uri="qemu+tcp://x/system", ssh=where)) as remote:
            return (await remote.run(["echo", "a b", "$HOME;'", "*"])).out

    return asyncio.run(hello())


def test_a_command_arrives_word_for_word(bench: Bench) -> None:
    assert say_hello(ssh_to(bench)) == "a b $HOME;' *\n"


def test_an_unknown_host_key_is_refused_with_the_line_to_add(bench: Bench, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    with pytest.raises(HostKeyRefused) as caught:
        say_hello(ssh_to(bench, known_hosts=known))

    message = str(caught.value)
    assert f"add this line to {known}: " in message
    assert not known.exists()
    known.write_text(message.rpartition(f"{known}: ")[2] + "\n")
    assert say_hello(ssh_to(bench, known_hosts=known))


def test_a_changed_host_key_is_refused(bench: Bench, tmp_path: Path) -> None:
    known, other = tmp_path / "known_hosts", tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    kind, body = other.with_suffix(".pub").read_text().split()[:2]
    known.write_text(f"{bench.plan.host('alpha').address} {kind} {body}\n")
    with pytest.raises(HostKeyRefused, match="has changed: the host sent ssh-ed25519 SHA256:"):
        say_hello(ssh_to(bench, known_hosts=known))

    assert say_hello(ssh_to(bench))


def test_a_key_that_is_not_allowed_is_a_refused_login(bench: Bench, tmp_path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "k"], check=True
    )
    with pytest.raises(RemoteError, match="was refused; set key_file"):
        say_hello(ssh_to(bench, key_file=tmp_path / "k"))


def test_a_connection_that_broke_is_opened_again(bench: Bench) -> None:
    async def ask_twice() -> None:
        async with Hypervisor(bench.inventory.host("alpha")) as hypervisor:
            await host_facts(hypervisor)
            bench.inside("alpha", "pkill", "-x", "libvirtd")
            until(lambda: not _libvirtd_runs(bench))
            bench.inside("alpha", "libvirtd", "--daemon", "--listen")
            lab_host.wait_until_up(bench.plan.host("alpha"))
            await host_facts(hypervisor)

    asyncio.run(ask_twice())


def _libvirtd_runs(bench: Bench) -> bool:
    return "libvirtd" in bench.inside("alpha", "ps", "-eo", "comm")


def test_a_host_that_hangs_costs_the_limit_and_no_more(bench: Bench) -> None:
    """A frozen libvirtd accepts connections and never answers."""
    bench.inside("alpha", "pkill", "-STOP", "-x", "libvirtd")
    try:
        done = bench.run("hosts", "--json")
    finally:
        bench.inside("alpha", "pkill", "-CONT", "-x", "libvirtd")

    assert done.code == 11
    assert [h["reachable"] for h in done.json] == [False, True]


def test_statistics_do_not_wait_for_the_long_call(bench: Bench) -> None:
    async def both() -> None:
        async with Hypervisor(bench.inventory.host("alpha")) as hypervisor:
            gate = asyncio.Event()
            loop = asyncio.get_running_loop()

            began = threading.Event()

            def block(_connection: object) -> None:
                began.set()
                asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

            long_call = asyncio.create_task(hypervisor.execute_long("waiting", block))
            assert await asyncio.to_thread(began.wait, 60.0)
            assert await find_guest(hypervisor, "nobody") is None
            assert not long_call.done()
            gate.set()
            await long_call

    asyncio.run(both())


def test_a_host_that_is_not_there_is_unreachable_with_a_hint(bench: Bench) -> None:
    async def ask() -> None:
        nowhere = Host(name="omega", uri=f"qemu+tcp://{bench.plan.controller_address}:1/system")
        async with Hypervisor(nowhere) as hypervisor:
            await host_facts(hypervisor)

    with pytest.raises(HostUnreachable, match="run vmckpt doctor omega"):
        asyncio.run(ask())


def test_nothing_of_libvirts_own_complaints_reaches_the_terminal(bench: Bench) -> None:
    network.cut(bench.plan, "beta")
    done = bench.run("hosts")

    assert "libvirt:" not in done.err
    assert len(done.err.strip().splitlines()) == 1
