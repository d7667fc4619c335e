"""An agent that waits for orders, on a host with its own /run."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting_agent import KEY, RELAY, WaitingHost, until
from vmckpt.agent import waiting
from vmckpt.remote.scripts import relay_order

NONE = relay_order.NONE


@pytest.fixture
def host(tmp_path: Path) -> Iterator[WaitingHost]:
    made = WaitingHost(tmp_path)
    yield made
    made.close()


def test_further_orders_are_carried_out_by_children_of_the_one_that_waits(
    host: WaitingHost,
) -> None:
    first = json.loads(host.first())
    (waits,) = host.waiting

    told = [json.loads(host.order("ids")[1]) for _ in range(2)]

    assert [one["parent"] for one in told] == [waits, waits]
    assert len({first["pid"], told[0]["pid"], told[1]["pid"], waits}) == 4
    assert host.waiting == [waits]


def test_an_order_has_the_environment_of_its_session_and_the_pythons_of_the_agent(
    host: WaitingHost,
) -> None:
    host.first()
    assert json.loads(host.order("ids", FRUIT="plum", PYTHONSAFEPATH="1")[1])["fruit"] == "plum"
    told = json.loads(host.order("ids", PYTHONSAFEPATH="1")[1])
    assert (told["fruit"], told["safe"]) == (None, "")


def test_status_and_errors_reach_the_session(host: WaitingHost) -> None:
    host.first()
    assert host.order("fail") == (3, "", "it failed\n")


def test_an_order_that_crashes_ends_neither_the_agent_nor_another_order(
    host: WaitingHost, tmp_path: Path
) -> None:
    host.first()
    other = host.relay()
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write(f"hold {tmp_path}/ended\n")
    other.stdin.flush()
    other.stdout.readline()

    assert host.order("crash")[0] == 1

    assert host.order("ids")[0] == 0
    assert not (tmp_path / "ended").exists()
    other.communicate(timeout=20.0)
    assert (other.returncode, (tmp_path / "ended").exists()) == (0, True)


@pytest.mark.parametrize("victim", ["relay", "session"])
def test_an_order_ends_when_its_session_does(
    host: WaitingHost, tmp_path: Path, victim: str
) -> None:
    host.first()
    relay = host.relay()
    assert relay.stdin is not None
    assert relay.stdout is not None
    relay.stdin.write(f"hold {tmp_path}/ended\n")
    relay.stdin.flush()
    agent = int(relay.stdout.readline())

    if victim == "relay":  # sshd then closes the session
        relay.kill()
    relay.stdin.close()
    relay.stdin = None

    until(lambda: agent not in host.processes())
    assert (tmp_path / "ended").exists()
    relay.communicate(timeout=20.0)
    assert host.order("ids")[0] == 0


def test_without_an_agent_the_order_remains_to_be_read(host: WaitingHost) -> None:
    words = (sys.executable, "-I", "-S", "-c", RELAY, KEY)
    text = '"$@"; test $? = 75 && cat'
    shell = host.popen("sh", "-c", text, "sh", *words)
    assert shell.communicate("the order\n", timeout=20.0)[0] == "the order\n"


def test_an_agent_that_was_killed_is_replaced_and_its_order_goes_on(
    host: WaitingHost, tmp_path: Path
) -> None:
    host.first()
    (waits,) = host.waiting
    relay = host.relay()
    assert relay.stdin is not None
    assert relay.stdout is not None
    relay.stdin.write(f"hold {tmp_path}/ended\n")
    relay.stdin.flush()
    relay.stdout.readline()

    os.kill(waits, signal.SIGKILL)
    until(lambda: host.waiting == [])

    assert host.order("ids")[0] == NONE
    host.first()
    assert host.order("ids")[0] == 0
    relay.communicate(timeout=20.0)
    assert (relay.returncode, (tmp_path / "ended").exists()) == (0, True)


def test_another_version_takes_its_place(host: WaitingHost) -> None:
    host.first()
    (old,) = host.waiting

    assert host.order("ids", "installed 2.0")[0] == NONE
    assert host.order("ids", KEY, "installed 2.0")[0] == 0
    host.first(key="installed 2.0")

    assert old not in host.processes()
    assert host.order("ids", KEY)[0] == NONE
    assert host.order("ids", KEY, "installed 2.0")[0] == 0


def test_of_two_that_start_at_once_one_stays(host: WaitingHost) -> None:
    host.first()
    (old,) = host.waiting
    host.first()
    assert old not in host.processes()
    assert host.order("ids")[0] == 0


def test_it_does_not_outlive_its_files(host: WaitingHost) -> None:
    host.first()
    host.source.write_text("newer")
    assert host.order("ids")[0] == NONE
    until(lambda: host.waiting == [])

    host.first()
    host.source.write_text("newest")
    until(lambda: host.waiting == [])


def test_it_ends_when_it_is_idle_or_its_socket_is_removed(host: WaitingHost) -> None:
    host.first(seconds=1.0)
    until(lambda: host.waiting == [])
    listed = host.popen("ls", "/run/vmckpt/agent").communicate(timeout=20.0)
    assert listed == ("", "")

    host.first()
    host.popen("rm", "-r", "/run/vmckpt").communicate(timeout=20.0)
    until(lambda: host.waiting == [])


def test_another_user_of_the_host_is_refused(host: WaitingHost) -> None:
    host.first()
    nobody = ("setpriv", "--reuid", "nobody", "--clear-groups")
    relay = host.popen(*nobody, "/usr/bin/python3", "-I", "-S", "-c", RELAY, KEY)
    assert (relay.communicate("ids\n", timeout=20.0)[0], relay.returncode) == ("", NONE)
    connects = (
        "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)"
        f".connect({relay_order.SOCKET!r})"
    )
    tries = host.popen(*nobody, "/usr/bin/python3", "-c", connects)
    assert "PermissionError" in tries.communicate(timeout=20.0)[1]


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        ((), True),
        (("setpriv", "--reuid", "nobody", "--clear-groups"), False),
        (("unshare", "--mount"), False),
        (("unshare", "--net"), False),
        (("unshare", "--pid", "--fork"), False),
    ],
)
def test_only_root_in_the_same_namespaces_is_accepted(
    tmp_path: Path, words: tuple[str, ...], accepted: bool
) -> None:
    path = f"\0vmckpt-{os.getpid()}-{tmp_path.name}"
    if "--net" in words:  # abstract names belong to a network namespace
        path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(20.0)
        connects = (
            "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
            f" s.connect({path!r}); s.recv(1)"
        )
        peer = subprocess.Popen([*words, "/usr/bin/python3", "-c", connects])
        line, _ = listener.accept()
        with line:
            assert waiting.is_accepted(line) == accepted
        peer.wait(20.0)


def test_a_peer_that_says_nothing_does_not_keep_others_waiting(host: WaitingHost) -> None:
    host.first()
    connects = (
        "import socket, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        f" s.connect({relay_order.SOCKET!r}); print(flush=True); time.sleep(60)"
    )
    silent = host.popen(sys.executable, "-c", connects)
    assert silent.stdout is not None
    silent.stdout.readline()
    assert host.order("ids")[0] == 0
    silent.kill()
    silent.communicate()


def test_all_modules_can_be_loaded_without_a_thread() -> None:
    program = (
        "import os; from vmckpt.agent import waiting;"
        " assert waiting.load_all() == waiting.sources();"
        " assert waiting._THREADS not in os.environ; print(len(os.listdir('/proc/self/task')))"
    )
    environment = {name: os.environ[name] for name in os.environ if name != waiting._THREADS}
    told = subprocess.check_output([sys.executable, "-c", program], text=True, env=environment)
    assert told == "1\n"
