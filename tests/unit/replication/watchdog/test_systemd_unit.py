"""Two watchdogs that restart each other, and one that systemd restarts."""

import base64
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.guards import Bench, dead, folder, until
from vmckpt.lease.clock import boottime
from vmckpt.replication.watchdog import process as watchdog_process
from vmckpt.replication.watchdog import shared_page, systemd_unit
from vmckpt.replication.watchdog.facts import Facts, Resumable
from vmckpt.replication.watchdog.process import WatchdogFailed

__all__ = ["folder"]

# One turn of the watchdog that acts, and what a test that looks may be kept waiting.
PROMPT = 0.1 + 0.15


@pytest.fixture
def pair(folder: Path) -> Iterator[Bench]:
    made = Bench(folder, pair=True)
    made.begin()
    yield made
    made.close()


def kill(*processes: int) -> None:
    for one in processes:
        os.kill(one, signal.SIGKILL)


def spare_of(bench: Bench) -> tuple[int, int]:
    """The one that acts, and its spare."""
    one, other = bench.guards()
    return (one, other) if _parent(other) == one else (other, one)


def _parent(process: int) -> int:
    stat = Path(f"/proc/{process}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def whole(bench: Bench, *but: int) -> bool:
    """Whether there is a pair without those, and its spare looks."""
    found = bench.guards()
    return len(found) == 2 and not set(found) & set(but) and bench.page.spared > boottime() - 0.2


def test_there_are_two_once_it_has_begun(pair: Bench) -> None:
    until(lambda: whole(pair))
    acting, spare = spare_of(pair)
    for one in (acting, spare):
        assert os.sched_getscheduler(one) & os.SCHED_FIFO
        assert os.getsid(one) == one
    pair.begin()
    assert sorted(pair.guards()) == sorted([acting, spare])


@pytest.mark.parametrize("which", [0, 1])
def test_either_is_replaced_by_the_other(pair: Bench, which: int) -> None:
    killed: list[int] = []
    for _ in range(3):
        until(lambda: whole(pair, *killed))
        killed.append(spare_of(pair)[which])
        kill(killed[-1])
    until(lambda: whole(pair, *killed))
    assert not dead(pair.qemu)
    assert pair.agents() == []  # theirs lives


@pytest.mark.parametrize("which", [0, 1])
def test_agent_and_one_of_them_killed_at_once_come_back(pair: Bench, which: int) -> None:
    until(lambda: whole(pair))
    one = spare_of(pair)[which]
    kill(one, pair.agent.pid)
    until(lambda: len(pair.agents()) == 1)
    until(lambda: whole(pair, one))
    pair.page.agent = shared_page.identity(pair.agents()[0])
    time.sleep(1.3)
    assert len(pair.agents()) == 1
    assert not dead(pair.qemu)


@pytest.mark.parametrize("which", [0, 1])
def test_agent_and_one_of_them_killed_at_once_save_no_guest(pair: Bench, which: int) -> None:
    until(lambda: whole(pair))
    pair.page.lasts = 0.4
    pair.page.renewed = boottime()
    kill(spare_of(pair)[which], pair.agent.pid)
    ends = pair.page.renewed + 0.4
    assert ends <= until(lambda: dead(pair.qemu)) < ends + PROMPT
    assert "valid for 0.40 s" in (pair.folder / watchdog_process.KILLED).read_text()


def test_one_of_them_that_is_stopped_saves_no_guest_and_is_replaced(pair: Bench) -> None:
    until(lambda: whole(pair))
    stopped = []
    for which in (0, 1):
        stopped.append(spare_of(pair)[which])
        os.kill(stopped[-1], signal.SIGSTOP)
        until(lambda: whole(pair, *stopped))
    pair.page.lasts = 0.4
    pair.page.renewed = boottime()
    acting = spare_of(pair)[0]
    os.kill(acting, signal.SIGSTOP)
    ends = pair.page.renewed + 0.4
    assert ends <= until(lambda: dead(pair.qemu)) < ends + PROMPT
    os.kill(acting, signal.SIGCONT)


def test_both_end_with_the_protection(pair: Bench) -> None:
    until(lambda: whole(pair))
    (pair.folder / watchdog_process.OVER).touch()
    until(lambda: not pair.guards())
    assert not dead(pair.qemu)


def test_a_pair_of_a_guest_that_is_gone_sees_that_its_agent_leaves_word(pair: Bench) -> None:
    until(lambda: whole(pair))
    pair.qemu.kill()
    pair.qemu.wait()
    one = spare_of(pair)[0]
    kill(one, pair.agent.pid)
    until(lambda: len(pair.agents()) == 1)
    until(lambda: whole(pair, one))


def test_a_single_one_has_no_spare(folder: Path) -> None:
    bench = Bench(folder)
    bench.begin()
    time.sleep(0.3)
    assert len(bench.guards()) == 1
    bench.close()


NOWHERE = Resumable(
    guest="0d6f7a57-be04-4dd1-80ff-c8e5fa28580b", host="alpha", uri="nothing:///", undo="{}",
    lock="",
)  # fmt: skip


def test_an_agent_is_started_where_the_guest_cannot_be_resumed(folder: Path) -> None:
    """libvirt does not answer: it is asked again, and the agent does it once it has come."""
    bench = Bench(folder, resumable=replace(NOWHERE, lock=f"{folder}/agent.lock"))
    bench.begin()
    bench.page.stopped = boottime()
    bench.agent.kill()
    until(lambda: "cannot resume the guest" in bench.log())
    until(lambda: len(bench.agents()) == 1)
    until(lambda: bench.log().count("cannot resume the guest") == 2)
    bench.page.agent = shared_page.identity(bench.agents()[0])
    bench.page.stopped = 0.0
    time.sleep(1.2)
    assert bench.log().count("cannot resume the guest") == 2
    assert len(bench.agents()) == 1
    bench.close()


def test_a_unit_is_told_all_by_systemd_itself() -> None:
    words = systemd_unit.unit_command(
        "vmckpt-watchdog-x.service", ["python", "-m", "guard"], b'{"a": 1}'
    )

    assert words[0] == "systemd-run"
    assert words[words.index("--") + 1 :] == ["python", "-m", "guard"]
    data = next(one for one in words if "StandardInputData=" in one).partition("Data=")[2]
    assert base64.b64decode(data) == b'{"a": 1}'
    for one in ("Restart=always", "KillMode=process", "OOMScoreAdjust=-1000", "StandardInput=data"):
        assert f"--property={one}" in words
    assert "--slice=vmckpt.slice" in words


# Does with a unit what systemd does: it starts the command again, with the same standard input,
# until that ends with 0. Its pid goes to UNIT.pid.
_SYSTEMD_RUN = """\
#!{python}
import base64, os, subprocess, sys, time
words = sys.argv[1 : sys.argv.index("--")]
command = sys.argv[sys.argv.index("--") + 1 :]
data = next(one for one in words if "StandardInputData=" in one).partition("Data=")[2]
if os.path.exists("{where}/state"):
    sys.exit("Unit was already loaded or has a fragment file.")
open("{where}/state", "w").write("active")
if os.fork():
    sys.exit(0)
os.setsid()
for number in (0, 1, 2):
    os.dup2(os.open("/dev/null", os.O_RDWR), number)
while subprocess.run(command, input=base64.b64decode(data)).returncode != 0:
    time.sleep(0.25)
os.unlink("{where}/state")
"""
_SYSTEMCTL = "#!/bin/sh\ncat {where}/state\n"


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what stands for systemd's programs; `state` is there while the unit is."""
    for name, text in (("systemd-run", _SYSTEMD_RUN), ("systemctl", _SYSTEMCTL)):
        file = tmp_path / name
        file.write_text(textwrap.dedent(text).format(python=sys.executable, where=tmp_path))
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_a_unit_that_is_killed_with_its_agent_comes_back(folder: Path, systemd: Path) -> None:
    bench = Bench(folder)
    watchdog_process.start(bench.facts, unit=True)
    (number,) = bench.guards()
    kill(number, bench.agent.pid)
    watchdog_process.start(bench.facts, unit=True)  # systemd has it, and starts it again
    assert bench.guards() not in ([], [number])
    until(lambda: len(bench.agents()) == 1)
    bench.page.lasts = 0.4
    bench.page.renewed = boottime()
    ends = bench.page.renewed + 0.4
    assert ends <= until(lambda: dead(bench.qemu)) < ends + PROMPT
    bench.close()
    until(lambda: not (systemd / "state").exists())


def test_a_systemd_that_refuses_is_told(folder: Path, systemd: Path) -> None:
    (systemd / "systemd-run").write_text("#!/bin/sh\necho no bus >&2; exit 1\n")
    (systemd / "state").write_text("inactive\n")
    bench = Bench(folder)
    with pytest.raises(WatchdogFailed, match="no bus"):
        watchdog_process.start(bench.facts, unit=True)
    bench.close()


def test_systemd_is_asked_only_where_it_runs_the_host(
    systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd_unit, "_BOOTED", tmp_path / "none")
    assert not systemd_unit.available()
    monkeypatch.setattr(systemd_unit, "_BOOTED", systemd)
    assert systemd_unit.available()
    monkeypatch.setenv("PATH", "/nowhere")
    assert not systemd_unit.available()


def test_facts_go_through_text_and_back() -> None:
    facts = Facts(
        page="/p", qemu=7, command=("a", "b"), folder="/f", pair=True,
        resumable=replace(NOWHERE, logs=("/l",)),
    )  # fmt: skip
    assert Facts.from_json(facts.to_json()) == facts


def test_the_watchdog_loads_what_is_large_only_where_it_needs_it() -> None:
    """It is locked in memory, one or two for each guest on each host."""
    code = "import sys, vmckpt.replication.watchdog.process as _;"
    code += "print(*(m in sys.modules for m in sys.argv[1:]))"
    loaded = subprocess.run(
        [sys.executable, "-c", code, "libvirt", "numpy"], capture_output=True, text=True, check=True
    )
    code = code.replace("process as", "resume as")
    resumes = subprocess.run(
        [sys.executable, "-c", code, "libvirt", "numpy"], capture_output=True, text=True, check=True
    )
    assert (loaded.stdout, resumes.stdout) == ("False False\n", "True False\n")


def test_systemd_is_given_signs_of_life_and_what_is_started_knows_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as heard:
        heard.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        signs = systemd_unit.Signs()
        assert "NOTIFY_SOCKET" not in os.environ
        for now in (10.0, 10.1, 10.4, 10.6):
            signs.give(now)
        assert [heard.recv(100) for _ in range(2)] == [b"WATCHDOG=1"] * 2
        with pytest.raises(BlockingIOError):
            heard.recv(100)
    signs.give(20.0)  # to nothing
    systemd_unit.Signs().give(20.0)  # no unit
