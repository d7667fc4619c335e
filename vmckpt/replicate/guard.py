"""The guard beside a protected guest: it kills QEMU when the lease has ended, whoever hangs.

`python -m vmckpt.replicate.guard FOLDER <FACTS` returns when it is armed; the guard itself goes on
in a session of its own, locked in memory. It also ends an agent that hangs and starts one that is
gone. Its folder must be on tmpfs: it waits for no disk. Markers there: `over` is made by whoever
ends the protection, `killed` is made here, with time and reason. A folder is used for one
protection.
"""

import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from vmckpt.errors import VmckptError
from vmckpt.hypervisor.qemu_process.held import HeldProcess
from vmckpt.lease.clock import boottime
from vmckpt.replicate import guarding
from vmckpt.replicate.guarding import Rules, Seen
from vmckpt.replicate.guardpage import GuardPage, identity, process_of

OVER, KILLED, LOG, AGENT_LOG, LOCK = "over", "killed", "guard.log", "agent.log", "guard.lock"
PAGE = "page"
_EVERYTHING = 3  # MCL_CURRENT | MCL_FUTURE
# A turn that comes later than this was held up, by more than a busy machine.
_GAP = 0.5
_ARMED = b"."
_ARMING = 10.0
_OOM = Path("/proc/self/oom_score_adj")


class GuardFailed(VmckptError):
    """The guard could not be armed; without it no lease may be relied upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What it must know; JSON on its standard input."""

    page: str
    """The page's path."""
    qemu: int
    """The `guardpage.identity` of the guest's process."""
    command: tuple[str, ...]
    """Starts the agent again; in the foreground, so that its death is seen."""
    folder: str
    rules: Rules = field(default_factory=Rules)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError if it is none."""
        try:
            told = json.loads(text)
            told["command"] = tuple(told["command"])
            told["rules"] = Rules(**told.get("rules", {}))
            return cls(**told)
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"no facts of a guard: {text[:60]!r}") from exc


def hold(known: int) -> HeldProcess | None:
    """A process by its `guardpage.identity`, to be closed; None if it has ended. Raises OSError."""
    try:
        process = HeldProcess(process_of(known))
    except (ProcessLookupError, OverflowError):
        return None
    with suppress(ProcessLookupError):
        if identity(process.pid) == known:
            return process
    process.close()
    return None


def begin(facts: Facts) -> None:
    """Start a guard and wait until it looks; fine if this one runs already. Raises GuardFailed."""
    try:
        page = GuardPage.open(Path(facts.page))
    except (OSError, ValueError) as exc:
        raise GuardFailed(f"the guest's guard cannot be started: {exc}") from exc
    before = boottime()
    # It runs what the facts say, so they come by a pipe: a file could be another by then.
    command = [sys.executable, "-m", "vmckpt.replicate.guard", facts.folder]
    try:
        subprocess.run(
            command, input=facts.to_json().encode(), capture_output=True, timeout=_ARMING,
            check=True,
        )  # fmt: skip
        while page.guarded < before:  # another page's guard may be the one that runs
            if boottime() > before + _ARMING:
                raise GuardFailed("the guest's guard does not look at its page")
            time.sleep(0.01)
    except subprocess.CalledProcessError as exc:
        told = exc.stderr.decode(errors="replace").strip().splitlines()
        raise GuardFailed(f"the guest's guard cannot be started: {told[-1:]}") from exc
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise GuardFailed(f"the guest's guard cannot be started: {exc}") from exc
    finally:
        page.close()


class Guard:
    """Looks, decides, does."""

    def __init__(self, facts: Facts) -> None:
        """Raises OSError, ValueError and ProcessLookupError: it would guard nothing."""
        self._facts = facts
        self._folder = Path(facts.folder)
        self._page = GuardPage.open(Path(facts.page))
        qemu = hold(facts.qemu)
        if qemu is None:
            raise ProcessLookupError(f"QEMU, process {process_of(facts.qemu)}, is gone")
        self._qemu = qemu
        self._agent: HeldProcess | None = None
        self._known = 0
        """The agent's identity."""
        self._told = 0
        """The one that stood in the page last."""
        self._agent_since: float = boottime()
        self._woke: float = self._agent_since
        self._last: float = self._agent_since
        self._started: float | None = None
        self._beats, self._spoke = self._page.beats, 0.0
        self._gone = 0.0
        self._shot = False
        self._ended = 0
        """The agent that was killed last."""

    def run(self) -> None:
        """Until there is nothing to guard."""
        while True:
            try:
                if not self.turn():
                    return
            except OSError as exc:  # whatever it is: the lease must not be left unguarded
                self._log(f"a turn failed: {exc}")
                time.sleep(guarding.TURN)

    def turn(self) -> bool:
        """Wait for at most a turn; False: it is over."""
        now = boottime()
        seen = self._look(now)
        match guarding.decide(seen, now, self._facts.rules):
            case guarding.Wait(until):
                self._wait(until)
            case guarding.KillGuest(why):
                self._kill_guest(why)
            case guarding.KillAgent(why):
                self._kill_agent(why)
                self._wait(now + guarding.TURN)
            case guarding.StartAgent():
                self._started = now
                self._start_agent(now)
            case guarding.End(why):
                self._log(f"ends: {why}")
                return False
        return True

    def _look(self, now: float) -> Seen:
        page = self._page
        page.guarded = now
        if now - self._last > _GAP:
            self._woke = now
        self._last = now
        if page.beats != self._beats:
            self._beats, self._spoke = page.beats, now
        with suppress(OSError):
            self._know_agent(page.agent, now)
        lives = self._qemu.lives()
        self._gone = 0.0 if lives else self._gone or now
        # Whoever has seen to everything removes the folder.
        over = os.access(self._folder / OVER, os.F_OK) or not os.access(self._folder, os.F_OK)
        return Seen(
            guest_lives=lives, gone=self._gone, over=over,
            renewed=page.renewed, lasts=page.lasts, stopped=page.stopped,
            agent_lives=self._agent is not None and self._agent.lives(),
            agent_since=self._agent_since, spoke=self._spoke, started=self._started,
            woke=self._woke,
        )  # fmt: skip

    def _know_agent(self, told: int, now: float) -> None:
        """Take note of one that came; one that we started needs not tell."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if told != self._told:
            self._told = told
            if told != self._known:
                self._take(told, now)

    def _take(self, known: int, now: float) -> None:
        if self._agent is not None:
            self._agent.close()
        self._agent, self._known, self._agent_since = None, known, now
        self._agent = hold(known)

    def _wait(self, until: float) -> None:
        files = [] if self._gone else [self._qemu.pidfd]
        if self._agent is not None and self._agent.lives():
            files.append(self._agent.pidfd)
        select.select(files, [], [], min(max(0.0, until - boottime()), guarding.TURN))

    def _kill_guest(self, why: str) -> None:
        self._qemu.kill()
        if not self._shot:
            self._shot = True
            self._log(f"killed the guest, process {process_of(self._facts.qemu)}: {why}")
            with suppress(OSError):
                temporary = self._folder / f".{KILLED}"
                temporary.write_text(f"{_date()} {why}\n")
                temporary.rename(self._folder / KILLED)
        select.select([self._qemu.pidfd], [], [], guarding.TURN)

    def _kill_agent(self, why: str) -> None:
        if self._agent is not None:
            self._agent.kill()
        if self._ended != self._known:
            self._ended = self._known
            self._log(f"killed the agent, process {process_of(self._known)}: {why}")

    def _start_agent(self, now: float) -> None:
        try:
            child = _spawn(self._facts.command, self._folder / AGENT_LOG)
            self._take(identity(child), now)
            self._log(f"started the agent again, process {child}")
        except OSError as exc:
            self._log(f"cannot start the agent: {exc}")

    def _log(self, line: str) -> None:
        with suppress(OSError), (self._folder / LOG).open("a") as log:
            log.write(f"{_date()} {line}\n")


def _date() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _spawn(command: Sequence[str], log: Path) -> int:
    """Start it as an ordinary process in a session of its own; its number. Raises OSError."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        _oom(_ORDINARY)
        told = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(told, 1)
        os.dup2(told, 2)
        os.execvp(command[0], [*command])
    finally:
        os._exit(127)


_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ORDINARY = "0"


def _oom(score: str) -> None:
    with suppress(OSError):
        _OOM.write_text(score)


def _privileges() -> list[str]:
    """What keeps it going on a machine in need; what it could not get."""
    missing = []
    if ctypes.CDLL(None).mlockall(_EVERYTHING) != 0:
        missing.append("locked memory")
    try:
        _OOM.write_text("-1000")
    except OSError:
        missing.append("protection from the out-of-memory killer")
    try:
        # What it starts is ordinary again.
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))
    except OSError:
        missing.append("real-time scheduling")
    return missing


def _daemon(facts: Facts, ready: int) -> None:
    """The guard's process: arm, say so, guard."""
    os.setsid()
    os.chdir("/")
    # It guards until all is over, also when the machine is shut down; `over` sends it away.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    guard = Guard(facts)
    missing = _privileges()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    if missing:
        guard._log("has no " + ", no ".join(missing))
    if guard.turn():
        os.write(ready, _ARMED)
        os.close(ready)
        guard.run()


def main() -> None:
    """Arm a guard and leave it. Exit status 1: there is none."""
    facts = Facts.from_json(sys.stdin.read())
    lock = os.open(Path(facts.folder) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    listen, ready = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(ready)
        sys.exit(0 if os.read(listen, 1) == _ARMED else 1)
    os.close(listen)
    _daemon(facts, ready)


if __name__ == "__main__":
    main()
