"""The hints about hosts and the inventory are commands that help: each is run as printed."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest

from tests.support.command_runs import Run, completed_driver, placed
from tests.support.following import take
from vmckpt.errors import CannotCapture
from vmckpt.hypervisor.qemu_process import identity


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Hosts of libvirt's test driver: alpha with the running guest `test`, and beta."""
    placed(tmp_path, monkeypatch)
    with_state = completed_driver(monkeypatch)
    next(with_state)
    yield Run(capsys)
    next(with_state, None)


def test_doctor_says_why_a_host_does_not_answer(run: Run, tmp_path: Path) -> None:
    (tmp_path / "beta").unlink()
    told = run.wrong("evacuate", "beta", "--dry-run")
    why = "libvirt cannot be reached: XML error: failed to parse"
    assert f"blocker beta: beta: {why}" in run.follow(told, code=21)


def test_doctor_says_what_to_do_about_hosts_that_may_be_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = libvirt.virConnect.getCapabilities
    uuid = "<host><uuid>22222222-2222-4222-8222-222222222222</uuid>"
    monkeypatch.setattr(
        libvirt.virConnect, "getCapabilities", lambda one: known(one).replace("<host>", uuid)
    )
    told = run.wrong("migrate", "test", "--to", "beta")
    assert "it is unknown whether alpha and beta are one host" in told
    assert "if they are one host, leave one of the names out" in run.follow(told, code=21)


def test_snapshots_are_encrypted_after_the_two_commands_of_doctor(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "hosts.yaml").open("a") as inventory:
        inventory.write(f"stores: {{near: {tmp_path / 'near'}}}\n")
    run.good("snapshot", "init")
    hint = run.wrong("doctor").partition("snapshots are not encrypted")[2].splitlines()[1]
    new, add = take(hint, FILE="alice", NAME="alice", KEY="KEY")
    key = run.good(*new.words[1:], "--no-passphrase").split()[0]
    run.good(*(key if word == "KEY" else word for word in add.words[1:]))
    assert "snapshots are encrypted for alice" in run.wrong("doctor")


def test_doctor_says_why_the_checks_over_ssh_were_not_made(run: Run, tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yaml"
    text = inventory.read_text()
    for end in ("default'", "beta'"):
        text = text.replace(end, f"{end}, ssh: {{address: '127.0.0.1', port: 1}}")
    inventory.write_text(text)
    told = run.wrong("migrate", "test", "--to", "beta", "--dry-run")
    (hint,) = [one for one in told.splitlines() if "without ssh" in one]
    shown = run.follow(hint, code=21)
    for host in ("alpha", "beta"):
        assert f"blocker {host}: {host}: ssh to 127.0.0.1:1: Connection refused" in shown
    login = next(one for one in shown.splitlines() if "run ssh" in one).partition("run ")[2]
    done = subprocess.run(login.split(), capture_output=True, text=True, check=False)
    assert "port 1: Connection refused" in done.stderr


def test_doctor_says_that_a_host_has_no_kvm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    known = libvirt.virDomain.XMLDesc

    def with_kvm(guest: libvirt.virDomain, flags: int = 0) -> str:
        return known(guest, flags).replace("domain type='test'", "domain type='kvm'")

    monkeypatch.setattr(libvirt.virDomain, "XMLDesc", with_kvm)
    told = run.wrong("migrate", "test", "--to", "beta", "--dry-run")
    (hint,) = [one for one in told.splitlines() if "choose another host, or run" in one]
    assert "enable virtualisation" in run.follow(hint, code=21)


def test_a_guest_without_qemu_is_found_among_the_guests(run: Run) -> None:
    with pytest.raises(CannotCapture) as caught:
        identity.require("6695eb01-f6a4-8304-79aa-97f2502e193f", "test", "beta")
    assert re.search(r"\btest\b.*\balpha\b.*running", run.follow(str(caught.value)))
