"""System calls in QEMU's main thread, and a timer by which the kernel kills it."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vmckpt.hypervisor.qemu_process import injection, lease_timer
from vmckpt.hypervisor.qemu_process.injection import CannotInject, Why
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.lease.clock import boottime
from vmckpt.units import Seconds
from vmckpt_lab.machine_speed import Deadline

_LISTENS = "00010000"
"""The flags of a listening socket in /proc/net/unix: __SO_ACCEPTCON."""
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


class Qemu:
    """A QEMU as libvirt starts one, without a guest."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "qmp"
        self.process = subprocess.Popen(
            [
                "qemu-system-x86_64", "-M", "none", "-nodefaults", "-display", "none", "-sandbox",
                _SANDBOX, "-qmp", f"unix:{self._socket},server=on,wait=off",
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        until = Deadline(20)
        while not self._listens():
            assert not until.passed()
            time.sleep(0.01)
        self.held = HeldProcess(self.process.pid)

    def _listens(self) -> bool:
        """A socket is in its directory before QEMU listens at it.

        This is not tried by a connection: QEMU may close the next one with it.
        """
        lines = Path("/proc/net/unix").read_text().splitlines()
        return any(
            line.split()[3] == _LISTENS and line.endswith(f" {self._socket}") for line in lines[1:]
        )

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as line, line.makefile("rw") as text:
            line.settimeout(20)
            line.connect(str(self._socket))
            text.readline()
            for command in ("qmp_capabilities", "query-status"):
                text.write(json.dumps({"execute": command}))
                text.flush()
                if "return" not in json.loads(text.readline()):
                    return False
        return True

    def close(self) -> None:
        self.held.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def qemu(tmp_path: Path) -> Iterator[Qemu]:
    made = Qemu(tmp_path)
    yield made
    made.close()


@pytest.fixture
def python() -> Iterator[Callable[[str], HeldProcess]]:
    """Starts a program that says a line when it is ready."""
    started: list[tuple[subprocess.Popen[str], HeldProcess]] = []

    def start(text: str) -> HeldProcess:
        process = subprocess.Popen(
            [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        started.append((process, HeldProcess(process.pid)))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return started[-1][1]

    yield start
    for process, held in started:
        held.close()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(process: HeldProcess, what: str) -> None:
    """Until its status in /proc says that."""
    until = Deadline(20)
    while what not in (status := Path(f"/proc/{process.pid}/status").read_text()):
        assert not until.passed(), status
        time.sleep(0.001)


def test_a_call_is_made_in_qemu_which_goes_on(qemu: Qemu) -> None:
    assert injection.run(qemu.held, lambda stopped: stopped.syscall("getpid")) == qemu.held.pid

    def both(stopped: injection.Stopped) -> int:
        made = stopped.syscall("userfaultfd", os.O_CLOEXEC | 1)
        assert (Path("/proc") / str(qemu.held.pid) / "fd" / str(made)).exists()
        return stopped.syscall("close", made)

    for _ in range(100):
        assert injection.run(qemu.held, both) == 0
    assert qemu.answers()


def test_an_error_of_the_call_is_raised(qemu: Qemu) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        injection.run(qemu.held, lambda stopped: stopped.syscall("close", 9999))
    assert qemu.answers()


def test_scratch_bytes_are_written_and_read(qemu: Qemu) -> None:
    def work(stopped: injection.Stopped) -> bytes:
        stopped.write(b"lease")
        return stopped.read(5)

    assert injection.run(qemu.held, work) == b"lease"
    with pytest.raises(ValueError, match="do not fit"):
        injection.run(qemu.held, lambda stopped: stopped.write(bytes(injection.SCRATCH + 1)))
    assert qemu.answers()


# Takes `work` on a process, and is killed at the Nth call of ptrace: before it, or after.
KILLED = """
import os, signal, sys
from vmckpt.hypervisor.qemu_process import injection, lease_timer
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.lease.clock import boottime
left, ptrace = int(sys.argv[2]), injection._ptrace
def counted(request, pid, data, address=0):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    ptrace(request, pid, data, address)
injection._ptrace = counted
lease_timer.arm(HeldProcess(int(sys.argv[1])), boottime() + 600)
"""


def test_qemu_goes_on_wherever_its_tracer_is_killed(qemu: Qemu) -> None:
    codes = []
    for step in range(1, 40):
        command = [sys.executable, "-c", KILLED, str(qemu.held.pid), str(step)]
        codes.append(subprocess.run(command, check=False).returncode)
        assert qemu.answers(), step
        assert "(qemu-system" in Path(f"/proc/{qemu.held.pid}/stat").read_text()
        if codes[-1] == 0:
            break
        lease_timer.disarm(qemu.held)
    assert len(codes) > 8
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert codes[-1] == 0


def test_an_unknown_processor_is_refused(qemu: Qemu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(CannotInject, match="CPU architecture riscv64") as caught:
        injection.run(qemu.held, lambda stopped: stopped.syscall("getpid"))
    assert caught.value.why is Why.UNSUPPORTED


def test_one_that_never_waits_is_busy(python: Callable[[str], HeldProcess]) -> None:
    held = python("print('ready', flush=True)\nwhile True: pass")
    wait_for(held, "State:\tR")
    time.sleep(0.5)  # it may be on its way out of the call that said "ready"
    with pytest.raises(CannotInject, match="is not waiting in a system call") as caught:
        injection.run(held, lambda stopped: stopped.syscall("getpid"), limit=Seconds(2.0))
    assert caught.value.why is Why.BUSY
    assert held.lives()


# Waits uninterruptibly, as for storage that hangs, until its child has ended.
IN_D_STATE = """
import ctypes, time, os
print("ready", flush=True)
CLONE_VFORK, SIGCHLD = 0x4000, 17
if ctypes.CDLL(None).syscall(56, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:
    time.sleep(2)
    os._exit(0)
time.sleep(600)
"""


def test_one_that_hangs_in_the_kernel_is_let_go(python: Callable[[str], HeldProcess]) -> None:
    held = python(IN_D_STATE)
    wait_for(held, "State:\tD")
    with pytest.raises(CannotInject, match="does not stop") as caught:
        injection.run(held, lambda stopped: stopped.syscall("getpid"), limit=Seconds(0.1))
    assert caught.value.why is Why.HANGS
    wait_for(held, "TracerPid:\t0\n")
    assert injection.run(held, lambda one: one.syscall("getpid"), limit=Seconds(30)) == held.pid


def test_one_that_is_stopped_stays_so(qemu: Qemu) -> None:
    assert qemu.answers()
    wait_for(qemu.held, "State:\tS")
    qemu.process.send_signal(signal.SIGSTOP)
    lease_timer.arm(qemu.held, boottime() + 600)
    assert lease_timer.armed(qemu.held) is not None
    wait_for(qemu.held, "State:\tT (stopped)")
    qemu.process.send_signal(signal.SIGCONT)
    assert qemu.answers()


def test_one_that_is_traced_by_another_or_gone_is_refused(qemu: Qemu) -> None:
    def inside(_: injection.Stopped) -> None:
        with pytest.raises(CannotInject) as caught:
            injection.run(qemu.held, lambda one: one.syscall("getpid"), limit=Seconds(0.05))
        assert caught.value.why is Why.REFUSED

    injection.run(qemu.held, inside)
    qemu.process.kill()
    qemu.process.wait()
    assert "it has ended" in str(lease_timer.why_not(qemu.held))


def test_signals_that_come_meanwhile_arrive(python: Callable[[str], HeldProcess]) -> None:
    held = python(
        "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: open('/proc/self/comm',"
        " 'w').write('heard'))\nprint('ready', flush=True)\nwhile True: time.sleep(600)"
    )

    def work(stopped: injection.Stopped) -> int:
        os.kill(held.pid, signal.SIGUSR1)
        return stopped.syscall("getpid")

    assert injection.run(held, work) == held.pid
    until = Deadline(10)
    while Path(f"/proc/{held.pid}/comm").read_text() != "heard\n":
        assert not until.passed()
        time.sleep(0.01)


def test_the_kernel_kills_qemu_when_nobody_renews(qemu: Qemu) -> None:
    assert lease_timer.why_not(qemu.held) is None
    assert lease_timer.armed(qemu.held) is None
    ends = 0.0
    for _ in range(5):
        ends = boottime() + 0.6
        lease_timer.arm(qemu.held, ends)
        time.sleep(0.2)
    assert lease_timer.armed(qemu.held) == 0
    assert qemu.answers()
    assert not qemu.held.ended(max(0.0, ends - boottime() - 0.05))
    assert qemu.held.ended(20)
    assert boottime() >= ends
    assert qemu.process.wait() == -signal.SIGKILL


def test_a_stopped_qemu_is_killed_as_well(qemu: Qemu) -> None:
    lease_timer.arm(qemu.held, boottime() + 0.3)
    qemu.process.send_signal(signal.SIGSTOP)
    assert qemu.held.ended(20)


def test_a_call_whose_end_is_not_observed_in_time_may_have_been_made(
    qemu: Qemu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an error does not mean that the timer is as it was."""
    go_on = injection._Tracer._go_on

    def late(tracer: injection._Tracer, how: int, until: int) -> None:
        go_on(tracer, how, until)
        if how == injection._CONT:
            raise CannotInject(tracer.pid, Why.BUSY)

    with monkeypatch.context() as changed:
        changed.setattr(injection._Tracer, "_go_on", late)
        with pytest.raises(CannotInject):
            lease_timer.arm(qemu.held, boottime() + 60)
    assert lease_timer.armed(qemu.held) is not None
    assert qemu.answers()


def test_a_time_that_has_passed_kills_at_once(qemu: Qemu) -> None:
    lease_timer.arm(qemu.held, boottime() - 5)
    assert qemu.held.ended(20)


def test_without_the_timer_it_lives_on(qemu: Qemu) -> None:
    lease_timer.disarm(qemu.held)
    lease_timer.arm(qemu.held, boottime() + 0.5)
    lease_timer.disarm(qemu.held)
    assert lease_timer.armed(qemu.held) is None
    assert not qemu.held.ended(0.8)
    assert qemu.answers()


@pytest.mark.parametrize("ends", [0.0, -1.0, float("nan"), float("inf"), 2.0**60])
def test_what_is_no_time_is_refused(qemu: Qemu, ends: float) -> None:
    with pytest.raises(ValueError, match="not a valid time"):
        lease_timer.arm(qemu.held, ends)
    assert qemu.answers()
