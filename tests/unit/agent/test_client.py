"""Which agent is used on a host, over a real ssh connection to a shell of this machine."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import paramiko
import pytest

from tests.support.bundles import BARE, drafts, ended, installed, small, started, versions
from tests.support.ssh_servers import KEY, Sshd, sshd
from vmckpt import __version__
from vmckpt.agent import bundle, client
from vmckpt.errors import RemoteError
from vmckpt.model.host import Host, SshAddress
from vmckpt.remote import agent_install
from vmckpt.units import Bytes, show_bytes

__all__ = ["sshd", "versions"]


@dataclass
class Machine:
    """A host that has a bare Python, and what was done there."""

    host: Host
    sshd: Sshd
    versions: Path
    path: Path
    """Its only folder of programs besides the usual ones."""
    installers: list[int] = field(default_factory=list)
    """Their processes."""
    meddle: Callable[["subprocess.Popen[bytes]"], None] = lambda _: None

    def serve(self, channel: paramiko.Channel, command: bytes) -> None:
        process = subprocess.Popen(
            [b"/bin/sh", b"-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={"PATH": f"{self.path}:/usr/bin:/bin"}, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        if b"def install(" in command:
            self.installers.append(process.pid)
            self.meddle(process)
        feeder = threading.Thread(target=self._feed, args=(channel, process), daemon=True)
        feeder.start()
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
        channel.sendall(out)
        channel.sendall_stderr(err)
        channel.send_exit_status(process.wait() % 256)
        channel.close()
        feeder.join(5.0)
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _feed(self, channel: paramiko.Channel, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        with suppress(OSError, ValueError):
            while data := channel.recv(1 << 16):
                process.stdin.write(data)
                process.stdin.flush()
        with suppress(OSError, ValueError):
            process.stdin.close()

    def program(self, name: str, text: str) -> None:
        """Put a program on its path."""
        (self.path / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.path / name).chmod(0o755)


@pytest.fixture
async def machine(
    sshd: Sshd, versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    key, known, path = tmp_path / "key", tmp_path / "known", tmp_path / "path"
    KEY.write_private_key_file(str(key))
    known.write_text(f"[127.0.0.1]:{sshd.port} {KEY.get_name()} {KEY.get_base64()}\n")
    path.mkdir()
    where = SshAddress(address="127.0.0.1", port=sshd.port, key_file=key, known_hosts=known)
    state = str(versions).removesuffix("-versions")
    host = Host(name="alpha", uri="qemu+ssh://alpha/system", ssh=where, agent_state=state)
    made = Machine(host=host, sshd=sshd, versions=versions, path=path)
    sshd.behave = made.serve
    made.program("python3", f'exec {BARE} "$@"')
    monkeypatch.setattr(sys, "executable", "/no/such/python")  # the host sees no checkout
    use(monkeypatch, small(tmp_path))
    return made


def use(monkeypatch: pytest.MonkeyPatch, made: bundle.Bundle) -> bundle.Bundle:
    """Let that be what is installed here."""
    monkeypatch.setattr(bundle, "current", cache(lambda: made))
    monkeypatch.setattr(bundle, "MODULES", ("vmckpt",))
    return made


AGENT = """import json, sys
if sys.argv[1:] == ["--version"]:
    print(VERSION)
else:
    order = json.loads(sys.stdin.readline())
    print(json.dumps({"done": {"do": order["do"], "words": sys.argv[1:]}}))
"""


async def carried_out(machine: Machine, *, install: bool = True) -> dict[str, Any]:
    return await client.run_order(
        machine.host, {"do": "x"}, lambda _: None, asyncio.Event(), install=install
    )


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent that waits on this machine gets an order of a test."""
    monkeypatch.setattr(client, "_relay", lambda: "import sys; sys.exit(75)")


async def test_an_order_finds_and_starts_an_agent_in_one_login(
    machine: Machine, elsewhere: None
) -> None:
    text = AGENT.replace("VERSION", repr(__version__))
    machine.program("vmckpt-agent", f'exec {BARE} -c {shlex.quote(text)} "$@"')
    logins = machine.sshd.logins

    told = await carried_out(machine)

    assert told == {"do": "x", "words": ["--wait", f"installed {__version__}", "300"]}
    assert machine.sshd.logins == logins + 1


async def test_an_order_brings_the_agent_and_further_orders_use_it(
    machine: Machine, elsewhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = AGENT.replace("VERSION", repr(__version__))
    made = use(monkeypatch, small(tmp_path, "waits", text))
    logins = machine.sshd.logins

    told = [await carried_out(machine) for _ in range(2)]

    launcher = f"{machine.versions}/{made.name}/bin/vmckpt-agent"
    assert told == [{"do": "x", "words": ["--wait", launcher, "300"]}] * 2
    assert len(machine.installers) == 1
    assert machine.sshd.logins == logins + 2, "one per order, including the installation"


async def test_orders_share_a_login(machine: Machine, elsewhere: None) -> None:
    text = AGENT.replace("VERSION", repr(__version__))
    machine.program("vmckpt-agent", f'exec {BARE} -c {shlex.quote(text)} "$@"')
    logins = machine.sshd.logins

    async with client.shared_logins():
        await carried_out(machine)
        await asyncio.gather(carried_out(machine), carried_out(machine))
    assert machine.sshd.logins == logins + 1

    await carried_out(machine)
    assert machine.sshd.logins == logins + 2


async def test_a_shared_login_is_opened_ahead_of_the_orders(
    machine: Machine, elsewhere: None
) -> None:
    text = AGENT.replace("VERSION", repr(__version__))
    machine.program("vmckpt-agent", f'exec {BARE} -c {shlex.quote(text)} "$@"')
    logins, called = machine.sshd.logins, threading.Event()

    def greet(_: object) -> bool:
        called.set()
        return True

    machine.sshd.greet = greet
    async with client.shared_logins(machine.host):
        assert await asyncio.to_thread(called.wait, 10.0)
        await carried_out(machine)
    assert machine.sshd.logins == logins + 1


async def test_a_login_that_fails_ahead_of_the_orders_is_reported_by_an_order(
    machine: Machine,
) -> None:
    async with client.shared_logins(machine.host):
        machine.sshd.close()
        with pytest.raises(RemoteError, match=r"^alpha: ssh to"):
            await carried_out(machine)


async def test_a_shared_login_that_broke_is_opened_again(machine: Machine, elsewhere: None) -> None:
    text = AGENT.replace("VERSION", repr(__version__))
    machine.program("vmckpt-agent", f'exec {BARE} -c {shlex.quote(text)} "$@"')

    async with client.shared_logins():
        await carried_out(machine)
        (login,) = (client._logins.get() or {}).values()
        assert login._client is not None
        login._client.close()
        assert (await carried_out(machine))["do"] == "x"


async def test_an_agent_that_waits_gets_the_order(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import json, sys; print(json.dumps({'done': {'keys': sys.argv[1:]}}))"
    monkeypatch.setattr(client, "_relay", lambda: text)
    assert await carried_out(machine) == {
        "keys": [f"installed {__version__}", f"/no/such/python {__version__}"]
    }


async def test_an_agent_that_never_starts_is_one_line(
    machine: Machine, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(*_: object, **__: object) -> tuple[str, ...]:
        return ("/no/such/python", "-P", "-m", "vmckpt.agent.main")

    monkeypatch.setattr(client, "ensure_agent", found)
    with pytest.raises(RemoteError, match=r"^alpha: vmckpt-agent did not start; run vmckpt"):
        await carried_out(machine)


async def test_an_agent_is_brought_to_a_host_once_and_that_is_told(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    made = bundle.current()

    first = await client.ensure_agent(machine.host)
    again = await client.ensure_agent(machine.host)

    assert first == again == (f"{machine.versions}/{made.name}/bin/vmckpt-agent",)
    said = await asyncio.to_thread(subprocess.check_output, [*first, "--version"], text=True)
    assert said == f"{__version__}\n"
    size = bundle.archive(made).stat().st_size
    assert len(machine.installers) == 1
    told = [one.message for one in caplog.records if one.name == "vmckpt.installing"]
    assert told == [f"installing the agent on alpha ({show_bytes(size)})"]
    assert machine.versions.stat().st_mode & 0o777 == 0o700


async def test_an_agent_that_is_not_needed_is_found_but_not_brought(
    machine: Machine, elsewhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, small(tmp_path, "waits", AGENT.replace("VERSION", repr(__version__))))
    with pytest.raises(RemoteError, match=r"^alpha: vmckpt-agent is not installed$"):
        await carried_out(machine, install=False)
    assert machine.installers == []

    (launcher,) = await client.ensure_agent(machine.host)
    assert await carried_out(machine, install=False) == {
        "do": "x", "words": ["--wait", launcher, "300"]
    }  # fmt: skip
    assert client._words(machine.host)[-1] == launcher


async def test_orders_that_come_at_once_bring_it_once(machine: Machine) -> None:
    found = await asyncio.gather(*(client.ensure_agent(machine.host) for _ in range(3)))

    assert len(set(found)) == 1
    assert len(machine.installers) == 1


async def test_an_agent_of_our_version_on_the_path_is_preferred(machine: Machine) -> None:
    machine.program("vmckpt-agent", f"echo {__version__}")

    assert await client.ensure_agent(machine.host) == (str(machine.path / "vmckpt-agent"),)
    assert machine.installers == []


@pytest.mark.parametrize("says", ["echo 0.0.1", "cat; exit 1", "exit 9"])
async def test_an_agent_of_another_version_is_left_alone_and_ours_is_put_beside_it(
    machine: Machine, says: str
) -> None:
    machine.program("vmckpt-agent", says)

    (found,) = await client.ensure_agent(machine.host)

    assert found.startswith(f"{machine.versions}/")
    assert (machine.path / "vmckpt-agent").exists()


async def test_our_own_interpreter_is_used_where_the_host_sees_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    assert await client.ensure_agent(machine.host) == (
        sys.executable,
        "-P",
        "-m",
        "vmckpt.agent.main",
    )


async def test_an_upgrade_goes_beside_what_runs(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = bundle.current()
    await client.ensure_agent(machine.host)
    running = started(machine.versions, old)
    try:
        new = use(monkeypatch, small(tmp_path, "new"))
        os.utime(machine.versions / old.name / "used", (0, 0))

        (found,) = await client.ensure_agent(machine.host)

        assert found == f"{machine.versions}/{new.name}/bin/vmckpt-agent"
        assert installed(machine.versions) == sorted([old.name, new.name])
        assert running.poll() is None
    finally:
        ended(running)


async def test_asking_for_a_version_keeps_it(machine: Machine) -> None:
    made = bundle.current()
    await client.ensure_agent(machine.host)
    used = machine.versions / made.name / "used"
    os.utime(used, (0, 0))

    await client.ensure_agent(machine.host)

    assert used.stat().st_mtime > time.time() - 60


async def test_another_python_there_is_one_line_that_says_what_to_do(machine: Machine) -> None:
    for name in ("python3", "python3.11"):
        machine.program(name, "echo python .cpython-39-aarch64-linux-gnu.so /usr/bin/python3")

    with pytest.raises(RemoteError) as caught:
        await client.ensure_agent(machine.host)

    ours = agent_install.OURS
    needed = f"Python {agent_install.python_version(ours)} for {ours.split('-', 2)[2]}"
    assert str(caught.value) == (
        "alpha: vmckpt-agent is not installed, and no Python on the host can run it: the host has"
        f" Python 3.9 for aarch64-linux-gnu, and the agent needs {needed};"
        f" install {needed} on alpha, or {agent_install.BY_HAND}"
    )
    assert machine.installers == []


async def test_an_installer_that_fails_is_one_line(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use(monkeypatch, replace(small(tmp_path), size=Bytes(1 << 60)))

    with pytest.raises(RemoteError) as caught:
        await client.ensure_agent(machine.host)

    assert str(caught.value) == (
        f"alpha: vmckpt-agent was not installed: {machine.versions}: not enough space for"
        f" {1 << 40} MiB; fix the cause, or {agent_install.BY_HAND}"
    )
    assert installed(machine.versions) == []
    assert made.name not in str(list((tmp_path / "state/agents").iterdir()))


async def test_an_installer_that_is_killed_there_is_one_line_and_the_next_order_mends_it(
    machine: Machine,
) -> None:
    def kill(process: "subprocess.Popen[bytes]") -> None:
        while not machine.versions.exists() or not drafts(machine.versions):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)

    machine.meddle = kill
    with pytest.raises(RemoteError, match="alpha: vmckpt-agent was not installed: status 247"):
        await client.ensure_agent(machine.host)
    assert installed(machine.versions) == []

    machine.meddle = lambda _: None
    await client.ensure_agent(machine.host)
    assert installed(machine.versions) == [bundle.current().name]
    assert drafts(machine.versions) == []


async def test_a_connection_that_breaks_meanwhile_is_one_line(machine: Machine) -> None:
    machine.meddle = lambda _: machine.sshd.close()

    with pytest.raises(RemoteError, match=r"alpha: sending .* failed: ") as caught:
        await client.ensure_agent(machine.host)

    assert "\n" not in str(caught.value)
    if machine.versions.exists():  # all of it may have been there before the connection broke
        assert installed(machine.versions) in ([], [bundle.current().name])


async def test_an_order_that_is_given_up_leaves_nothing(machine: Machine) -> None:
    stopped = threading.Event()

    def stop(process: "subprocess.Popen[bytes]") -> None:
        os.killpg(process.pid, signal.SIGSTOP)
        stopped.set()
        give_up = time.monotonic() + 5
        while not task.done() and time.monotonic() < give_up:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)

    machine.meddle = stop
    task = asyncio.create_task(client.ensure_agent(machine.host))
    await asyncio.to_thread(stopped.wait, 10.0)
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert time.monotonic() - began < 3.0
    assert not machine.versions.exists() or installed(machine.versions) == []


async def test_nothing_is_put_where_nothing_may_be_changed(machine: Machine) -> None:
    with pytest.raises(
        RemoteError,
        match="vmckpt-agent is not installed, and read-only mode forbids its installation",
    ):
        await client.ensure_agent(replace(machine.host, read_only=True))

    assert not machine.versions.exists()


async def test_looking_whether_there_may_be_an_agent_installs_none(machine: Machine) -> None:
    await client.require_agent(machine.host)
    with pytest.raises(
        RemoteError,
        match="vmckpt-agent is not installed, and read-only mode forbids its installation",
    ):
        await client.require_agent(replace(machine.host, read_only=True))
    assert not machine.versions.exists()

    await client.ensure_agent(machine.host)
    await client.require_agent(replace(machine.host, read_only=True))
    for name in ("python3", "python3.11"):
        machine.program(name, "echo python .cpython-39-aarch64-linux-gnu.so /usr/bin/python3")
    machine.versions.rename(machine.versions.with_name("away"))
    with pytest.raises(RemoteError, match="no Python on the host can run it"):
        await client.require_agent(machine.host)
