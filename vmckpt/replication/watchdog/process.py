"""The watchdog process of a protected guest: it kills QEMU when the lease has ended.

`python -m vmckpt.replication.watchdog.process FOLDER <FACTS` returns when the watchdog is armed;
the watchdog itself keeps running in its own session, locked in memory. With `--stay`, which a
systemd unit needs, the command does not return. The watchdog also resumes a guest that a dead agent
left paused, kills a hung agent, and restarts the agent.

A watchdog's directory is used for one protection. It must be on tmpfs, so that the watchdog never
waits for a disk. The directory can contain two marker files: `over` is created when the protection
ends; `killed`, with time and reason, is created by the watchdog.

A pair consists of two watchdog processes: an active watchdog and its spare, forked from it. When
the active watchdog dies, the spare becomes active and forks a new spare. Both processes kill the
guest when the lease ends.
"""

import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import VmckptError
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.lease.clock import boottime
from vmckpt.replication import priority
from vmckpt.replication.watchdog import rules, systemd_unit
from vmckpt.replication.watchdog.facts import Facts, Resumable
from vmckpt.replication.watchdog.rules import SpareSeen, WatchdogFacts
from vmckpt.replication.watchdog.shared_page import WatchdogPage, identity, process_of

OVER, KILLED, LOG, AGENT_LOG, LOCK = "over", "killed", "guard.log", "agent.log", "guard.lock"
PAGE = "page"
_STAY = "--stay"
_CURRENT, _FUTURE, _ON_FAULT = 1, 2, 4  # MCL_*, for mlockall(2)
# If a cycle is later than this, in seconds, load alone does not explain the delay: the agent could
# not run meanwhile either.
_GAP = 0.5
_ARMED = b"."
_ARMING = 10.0
_TURNS = 0.25
"""A live watchdog has run a cycle within this time, in seconds."""
_OOM = Path("/proc/self/oom_score_adj")
_RESUMES = 10
"""Time limit for a process that resumes the guest, in seconds."""
_SPARE_AGAIN = 0.2
"""A spare is forked at most this often, in seconds."""


class WatchdogFailed(VmckptError):
    """The guest's watchdog could not be started."""


def hold(known: int) -> HeldProcess | None:
    """Open a process by its `shared_page.identity`; None if the process no longer exists.

    The caller must close the returned object. Raises OSError.
    """
    try:
        process = HeldProcess(process_of(known))
    except (ProcessLookupError, OverflowError):
        return None
    with suppress(ProcessLookupError):
        if identity(process.pid) == known:
            return process
    process.close()
    return None


def start(facts: Facts, *, unit: bool = False) -> None:
    """Start a watchdog and wait until it is active, unless it is already running.

    `unit`: let systemd start it, and restart it whenever it dies. Raises WatchdogFailed.
    """
    try:
        page = WatchdogPage.open(Path(facts.page))
    except (OSError, ValueError) as exc:
        raise _failed(str(exc)) from exc
    before = boottime()
    try:
        if not (page.guarded > before - _TURNS and _looks(page, before, _TURNS)):
            _start(facts, unit=unit)
            if not _looks(page, before, _ARMING):
                raise _failed("it did not become active")
    except subprocess.CalledProcessError as exc:
        told = exc.stderr.decode(errors="replace").strip().splitlines()
        raise _failed(told[-1] if told else "no reason reported") from exc
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise _failed(str(exc)) from exc
    finally:
        page.close()


def _looks(page: WatchdogPage, since: float, limit: float) -> bool:
    """Wait until a watchdog has run a cycle after `since`. Returns False after `limit` seconds."""
    give_up = boottime() + limit
    while page.guarded < since:
        if boottime() > give_up:
            return False
        time.sleep(0.01)
    return True


def _failed(why: str) -> WatchdogFailed:
    return WatchdogFailed(f"the guest's watchdog cannot be started: {why}")


def _locked(folder: Path) -> int | None:
    """Take the watchdog lock of a directory. Returns None if another watchdog holds the lock.

    Raises OSError.
    """
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _start(facts: Facts, *, unit: bool) -> None:
    """Start the process or unit. Raises WatchdogFailed, OSError, subprocess.SubprocessError."""
    process = hold(facts.qemu)
    if process is None:
        raise _failed(f"QEMU, process {process_of(facts.qemu)}, is gone")
    process.close()
    # The watchdog runs a command from the facts, so they are sent over a pipe: a file could be
    # replaced before it is read.
    command, told = (
        [sys.executable, "-P", "-m", "vmckpt.replication.watchdog.process"],
        facts.to_json().encode(),
    )
    if unit:
        words = [*command, _STAY, facts.folder]
        systemd_unit.start(words, told, folder=facts.folder, limit=_ARMING)
    else:
        subprocess.run(
            [*command, facts.folder], input=told, capture_output=True, timeout=_ARMING, check=True
        )


class Watchdog:
    """The active watchdog: in each cycle, it gathers facts, decides and acts."""

    def __init__(
        self, facts: Facts, page: WatchdogPage, qemu: HeldProcess | None, lock: int
    ) -> None:
        """`qemu`: None if QEMU is gone; `lock`: the directory's lock, which a spare inherits."""
        self._facts, self._page, self._qemu, self._lock = facts, page, qemu, lock
        self._folder = Path(facts.folder)
        self._trigger, self._signs = Trigger(facts, qemu), systemd_unit.Signs()
        self._agent: HeldProcess | None = None
        self._known = 0
        """The `shared_page.identity` of the agent."""
        self._told = 0
        """The agent's identity as last read from the page."""
        self._agent_since: float = boottime()
        self._woke: float = self._agent_since
        self._last: float = self._agent_since
        self._came = 0.0
        self._started: float | None = None
        self._resumed: float | None = None
        self._resumer: HeldProcess | None = None
        self._loaded = False
        self._beats, self._spoke = page.beats, 0.0
        self._gone = 0.0
        self._ended = 0
        """Identity of the agent that was killed last."""
        self._spare: HeldProcess | None = None
        self._spare_since = float("-inf")
        self.spare_of: HeldProcess | None = None
        """In a spare's process: the active watchdog. None: this process is the active watchdog."""

    def run(self) -> None:
        """Run until nothing is left to guard; return immediately in a newly forked spare."""
        while True:
            try:
                if not self.turn():
                    return
                self._load()
            # The lease must be enforced, whatever fails.
            except (OSError, ImportError) as exc:
                self.log(f"a check of the guest and its lease failed: {exc}")
                time.sleep(rules.TURN)

    def turn(self) -> bool:
        """Run one cycle, of at most `rules.TURN`.

        Returns False if nothing is left to guard, or if this process is a new spare.
        """
        now = boottime()
        seen = self._look(now)
        if self._facts.pair and not seen.over and self._is_new_spare(now):
            return False
        match rules.decide(seen, now, self._facts.rules):
            case rules.Wait(until):
                self._wait(until)
            case rules.KillGuest(why):
                self._trigger.kill(why)
            case rules.KillAgent(why):
                self._kill_agent(why)
                self._wait(now + rules.TURN)
            case rules.StartAgent():
                self._started = now
                self._start_agent(now)
            case rules.ResumeGuest():
                self._resumed = now
                self._resume_guest(now)
            case rules.End(why):
                self.log(f"exiting: {why}")
                return False
        return True

    def _look(self, now: float) -> WatchdogFacts:
        page = self._page
        page.guarded = now
        self._signs.give(now)
        if now - self._last > _GAP:
            self._woke = now
        self._last = now
        if page.beats != self._beats:
            self._beats, self._spoke = page.beats, now
        with suppress(OSError):
            self._know_agent(page.agent, now)
        lives = self._qemu is not None and self._qemu.lives()
        self._gone = 0.0 if lives else self._gone or now
        return WatchdogFacts(
            guest_lives=lives, gone=self._gone, over=_is_over(self._folder),
            renewed=page.renewed, lasts=page.lasts, stopped=page.stopped,
            agent_lives=self._agent is not None and self._agent.lives(),
            agent_since=self._agent_since, came=self._came, spoke=self._spoke,
            started=self._started, woke=self._woke,
            resumable=self._facts.resumable is not None,
            resuming=self._resumer is not None and self._resumer.lives(), resumed=self._resumed,
        )  # fmt: skip

    def _know_agent(self, told: int, now: float) -> None:
        """Record that an agent has started to work, and reap child processes.

        `told`: process ID of the agent that started last.
        """
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if told != self._told:
            self._told = told
            if told != self._known:
                self._take(told, now)
            self._came = now

    def _take(self, known: int, now: float) -> None:
        if self._agent is not None:
            self._agent.close()
        self._agent, self._known, self._agent_since, self._came = None, known, now, 0.0
        self._agent = hold(known)

    def _wait(self, until: float) -> None:
        awaited = (None if self._gone else self._qemu, self._agent, self._resumer, self._spare)
        # A process that is already dead must not end the wait.
        files = [one.pidfd for one in awaited if one is not None and one.lives()]
        select.select(files, [], [], min(max(0.0, until - boottime()), rules.TURN))

    def _kill_agent(self, why: str) -> None:
        if self._agent is not None:
            self._agent.kill()
        if self._ended != self._known:
            self._ended = self._known
            self.log(f"killed the agent, process {process_of(self._known)}: {why}")

    def _start_agent(self, now: float) -> None:
        try:
            child = _spawn(self._facts.command, self._folder / AGENT_LOG)
            self._take(identity(child), now)
            self.log(f"started the agent again, process {child}")
        except OSError as exc:
            self.log(f"cannot start the agent: {exc}")

    def _resume_guest(self, now: float) -> None:
        """Resume the guest in a separate process: libvirt may hang until after the lease ends."""
        facts = self._facts.resumable
        if facts is None:
            return
        if self._resumer is not None:
            self._resumer.close()
            self._resumer = None
        paused = now - self._page.stopped
        self.log(f"resuming the guest, which vmckpt's agent left paused {paused:.2f} s ago")
        self._resumer = HeldProcess(_forked(lambda: self._resume(facts)))

    def _resume(self, facts: Resumable) -> None:
        os.close(self._lock)
        signal.alarm(_RESUMES)
        with suppress(OSError):
            _hurry()
        from vmckpt.replication.watchdog.resume import resume  # noqa: PLC0415 - see `_load`

        try:
            done = resume(facts, self._page)
        except (VmckptError, OSError, ValueError) as exc:
            self.log(f"cannot resume the guest: {exc}")
        else:
            self.log("the guest is running" if done else "a working agent will resume the guest")

    def _load(self) -> None:
        """Import `resume` before it is needed, since it is three times as large as the watchdog."""
        if not self._loaded and self._facts.resumable is not None:
            self._loaded = True
            import vmckpt.replication.watchdog.resume  # noqa: F401, PLC0415

    def _is_new_spare(self, now: float) -> bool:
        """Ensure that a spare is running. Returns whether this process is a new spare."""
        spare, looked = self._spare, max(self._page.spared, self._spare_since)
        if spare is not None and spare.lives():
            if not rules.stuck(looked, self._woke, now):
                return False
            self.log(f"killed the spare watchdog, process {spare.pid}, because it hung")
            spare.kill()
        if now < self._spare_since + _SPARE_AGAIN:
            return False
        if spare is not None:
            spare.close()
        self._spare, self._spare_since = None, now
        return self._fork_spare()

    def _fork_spare(self) -> bool:
        acting = HeldProcess(os.getpid())
        try:
            child = os.fork()
        except OSError:
            acting.close()
            raise
        if child == 0:
            self.spare_of = acting
            return True
        acting.close()
        self._spare = HeldProcess(child)
        self.log(f"forked a spare watchdog, process {child}")
        return False

    def as_spare(self, acting: HeldProcess) -> "Spare":
        """Return the Spare that runs in a forked process until it must become active."""
        return Spare(self._facts, self._page, self._qemu, acting)

    def anew(self) -> "Watchdog":
        """Return the active watchdog for the process of a spare that takes over."""
        return Watchdog(self._facts, self._page, self._qemu, self._lock)

    def log(self, line: str) -> None:
        _log(self._folder, line)


class Spare:
    """The spare watchdog of a pair: it waits until the active watchdog is gone."""

    def __init__(
        self, facts: Facts, page: WatchdogPage, qemu: HeldProcess | None, acting: HeldProcess
    ) -> None:
        self._folder, self._page, self._qemu, self._acting = Path(facts.folder), page, qemu, acting
        self._trigger = Trigger(facts, qemu)
        self._woke: float = boottime()
        self._last: float = self._woke

    def waits(self) -> bool:
        """Wait until this process must become active. Returns False if the protection ends."""
        while True:
            now = boottime()
            match rules.stand_by(self._look(now), now):
                case rules.Wait(until):
                    left = min(max(0.0, until - boottime()), rules.TURN)
                    select.select([self._acting.pidfd], [], [], left)
                case rules.KillGuest(why):
                    self._trigger.kill(why)
                case rules.KillPartner(why):
                    _log(self._folder, f"killed the watchdog, process {self._acting.pid}: {why}")
                    self._acting.end(rules.TURN)
                case rules.TakeOver():
                    _log(self._folder, f"the watchdog, process {self._acting.pid}, is gone:"
                         f" process {os.getpid()} takes over")  # fmt: skip
                    self._acting.close()
                    return True
                case rules.End():
                    return False

    def _look(self, now: float) -> SpareSeen:
        page = self._page
        page.spared = now
        if now - self._last > _GAP:
            self._woke = now
        self._last = now
        return SpareSeen(
            guest_lives=self._qemu is not None and self._qemu.lives(),
            over=_is_over(self._folder), renewed=page.renewed, lasts=page.lasts,
            partner_lives=self._acting.lives(), looked=page.guarded, woke=self._woke,
        )  # fmt: skip


class Trigger:
    """Kills the guest, and records the reason in the log and in a marker file."""

    def __init__(self, facts: Facts, qemu: HeldProcess | None) -> None:
        self._folder, self._qemu = Path(facts.folder), qemu
        self._shot = False

    def kill(self, why: str) -> None:
        """Send SIGKILL and wait at most one cycle for QEMU to exit. May be repeated."""
        if self._qemu is None:
            return
        self._qemu.kill()
        if not self._shot:
            self._shot = True
            _log(self._folder, f"killed the guest, process {self._qemu.pid}: {why}")
            with suppress(OSError):
                temporary = self._folder / f".{KILLED}"
                temporary.write_text(f"{_date()} {why}\n")
                temporary.rename(self._folder / KILLED)
        self._qemu.ended(rules.TURN)


def _is_over(folder: Path) -> bool:
    """Return whether the protection has ended: its directory is marked as over, or removed."""
    return os.access(folder / OVER, os.F_OK) or not os.access(folder, os.F_OK)


def _log(folder: Path, line: str) -> None:
    with suppress(OSError), (folder / LOG).open("a") as log:
        log.write(f"{_date()} {line}\n")


def _date() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _forked(work: Callable[[], None]) -> int:
    """Call `work` in a child process, which exits afterwards. Returns its process ID.

    Raises OSError.
    """
    child = os.fork()
    if child:
        return child
    status = 127
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def _spawn(command: Sequence[str], log: Path) -> int:
    """Start a command as an ordinary process in its own session. Returns its process ID.

    Raises OSError.
    """

    def work() -> None:
        os.setsid()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        _oom(_ORDINARY)
        with suppress(OSError):  # the agent also does this once it has started
            priority.raise_own()
        told = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(told, 1)
        os.dup2(told, 2)
        os.execvp(command[0], [*command])

    return _forked(work)


_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ORDINARY = "0"


def _oom(score: str) -> None:
    with suppress(OSError):
        _OOM.write_text(score)


def _hurry() -> None:
    """Give this process real-time priority, but not its children. Raises OSError."""
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def _privileges() -> list[str]:
    """Acquire the privileges that keep the watchdog running on an overloaded machine.

    Returns the names of the privileges that could not be acquired.
    """
    missing = []
    # Lock all current memory. Memory that is mapped later is locked when it is first used.
    mlockall = ctypes.CDLL(None).mlockall
    if mlockall(_CURRENT) != 0 or mlockall(_FUTURE | _ON_FAULT) != 0:
        missing.append("locked memory")
    try:
        _OOM.write_text("-1000")
    except OSError:
        missing.append("protection from the out-of-memory killer")
    try:
        _hurry()
    except OSError:
        missing.append("real-time scheduling")
    return missing


def _guard(facts: Facts, lock: int, armed: Callable[[], None]) -> None:
    """Run the watchdog, and call `armed` after its first cycle. Raises OSError, ValueError."""
    os.chdir("/")
    # The watchdog runs until `over` exists, even while the machine is shutting down.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    watchdog = Watchdog(facts, WatchdogPage.open(Path(facts.page)), hold(facts.qemu), lock)
    missing = _privileges()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    if missing:
        watchdog.log("running without " + ", without ".join(missing))
    if watchdog.turn():
        armed()
        watchdog.run()
    while (acting := watchdog.spare_of) is not None:
        # From here on, this process is the spare that was forked.
        os.setsid()
        _privileges()
        if not watchdog.as_spare(acting).waits():
            return
        watchdog = watchdog.anew()
        watchdog.run()


def main() -> None:
    """Arm a watchdog in the background; with --stay, run it in this process.

    Does nothing if the directory already has a watchdog. The exit status is 1 if the watchdog could
    not be armed.
    """
    facts = Facts.from_json(sys.stdin.read())
    if (lock := _locked(Path(facts.folder))) is None:
        return
    if _STAY in sys.argv[1:]:
        _guard(facts, lock, lambda: None)
        return
    listen, ready = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(ready)
        sys.exit(0 if os.read(listen, 1) == _ARMED else 1)
    os.close(listen)
    os.setsid()

    def armed() -> None:
        os.write(ready, _ARMED)
        os.close(ready)

    _guard(facts, lock, armed)


if __name__ == "__main__":
    main()
