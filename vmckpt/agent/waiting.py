"""An agent that waits on its host for further orders, which then need not start Python again.

The first agent imports all modules and then forks. The child, which waits, carries out no order
itself: it forks for each order, and the new process takes over the descriptors and the environment
of the order's ssh session. So orders are as separate as with one agent per order: if one of them
crashes or is killed, the others continue. The waiting process has no threads and no connections to
libvirt, since neither survives a fork.

The waiting process listens on /run/vmckpt/agent/socket, and accepts only root from its own
namespaces. The client is `remote.scripts.relay_order`. The process exits when it has received no
order for some minutes, when its socket was replaced by that of another agent, and when vmckpt's
files were changed.
"""

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import vmckpt
from vmckpt.errors import RemoteError
from vmckpt.remote.scripts import relay_order
from vmckpt.util import host_directories
from vmckpt.util.host_directories import run_dir

MODULES = (
    "vmckpt.agent.main",
    "vmckpt.agent.snapshot.create",
    "vmckpt.agent.restore.files",
    "vmckpt.agent.restore.family",
    "vmckpt.agent.restore.keeper_guard",
    "vmckpt.agent.restore.lazy",
    "vmckpt.agent.snapshot.transfer_parent_state",
    "vmckpt.agent.snapshot.undo_create",
    "vmckpt.agent.replication.main",
    "vmckpt.agent.replication.orders",
    "vmckpt.agent.restore.restore",
    "vmckpt.agent.restore.lazy_server",
    "vmckpt.agent.restore.undo_restore",
    "vmckpt.agent.network_cards",
    "vmckpt.agent.written_pages",
    "vmckpt.capture.memory.undo_process",
    "vmckpt.capture.network_hold_undo_process",
    "vmckpt.replication.watchdog.process",
    "vmckpt.store.backend.s3",
)
"""Modules that are started on hosts, and modules that these import only when needed."""
_COMM = "vmckpt-waiting"
"""The process's name in the output of `ps`, at most 15 characters."""
_LONGEST = 160 << 10
_HANDSHAKE = 2.0
_LOOKS = 5.0
"""Seconds between two checks for a replaced socket or replaced files."""
_NAMESPACES = ("mnt", "net", "pid", "user", "ipc", "uts", "cgroup")
_THREADS = "OPENBLAS_NUM_THREADS"

CarryOut = Callable[[], int]
"""Carries out the order on the standard streams, and returns the exit status."""
Sources = frozenset[tuple[str, int, int, int]]
"""Path, modification time, size and inode number of each of vmckpt's modules."""


def load_all() -> Sources | None:
    """Import all modules that orders may need.

    Returns the state of vmckpt's files before the imports; None if modules are missing. Raises
    OSError.
    """
    loaded = sources()
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"  # otherwise, NumPy's library starts threads when it is loaded
    try:
        for name in MODULES:
            import_module(name)
    except ImportError:
        return None
    finally:
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before
    return loaded


def leave_behind(key: str, seconds: float, loaded: Sources, carry_out: CarryOut) -> None:
    """Fork a process that waits for further orders, and return in this process.

    `key`: the agent that an order must name; `seconds`: how long to wait for the next order;
    `loaded`: the result of `load_all`. If no process can wait here, each order starts its own
    agent.
    """
    # A lock held by another thread would stay locked in each child.
    if os.geteuid() != 0 or len(list(Path("/proc/self/task").iterdir())) > 1:
        return
    try:
        if os.fork() != 0:
            return
    except OSError:
        return
    try:
        os.setsid()
        _take_over([os.open(os.devnull, os.O_RDWR)] * 3)
        os.chdir("/")
        with suppress(OSError):
            Path("/proc/self/comm").write_text(_COMM)
        with suppress(OSError, RemoteError):
            _wait(Path(relay_order.SOCKET), _Waiting(key, seconds, loaded, carry_out))
    finally:
        os._exit(0)


def _take_over(descriptors: list[int]) -> None:
    """Make descriptors the standard streams, and close the originals."""
    for number, one in enumerate(descriptors):
        os.dup2(one, number)
    for one in set(descriptors):
        if one > 2:
            os.close(one)


def _wait(path: Path, waiting: "_Waiting") -> None:
    """Listen on a socket at `path`, and serve orders until it is time to exit."""
    run_dir()
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    host_directories.verify(path.parent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        listener.bind(os.fspath(draft))
        listener.listen(64)
        draft.rename(path)  # if another process waits already, it notices and exits
        mine = _identity(path)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
        gc.collect()
        gc.freeze()  # a collection in a child would otherwise copy all these objects
        try:
            waiting.serve(listener, lambda: _identity(path) == mine)
        finally:
            if _identity(path) == mine:
                path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        seen = path.lstat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def sources() -> Sources:
    """Return the state of vmckpt's files. Takes about 5 ms. Raises OSError."""
    return frozenset(_below(str(Path(vmckpt.__file__).parent)))


def _below(folder: str) -> Iterator[tuple[str, int, int, int]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for one in entries:
            if one.is_dir(follow_symlinks=False):
                yield from _below(one.path)
            elif one.name.endswith(".py"):
                seen = one.stat()
                yield one.path, seen.st_mtime_ns, seen.st_size, seen.st_ino


@dataclass
class _Waiting:
    """The waiting process."""

    key: str
    seconds: float
    loaded: Sources
    carry_out: CarryOut

    def serve(self, listener: socket.socket, is_mine: Callable[[], bool]) -> None:
        """Serve orders. Returns when this process is no longer needed. Raises OSError."""
        listener.settimeout(_LOOKS)
        last = time.monotonic()
        while time.monotonic() - last < self.seconds:
            try:
                line, _ = listener.accept()
            except TimeoutError:
                if not is_mine() or sources() != self.loaded:
                    return
                continue
            with line:
                variables = self._heard(line)
                if variables is None:
                    continue
                if sources() != self.loaded:
                    return
                if self.key not in variables[0]:
                    continue  # the other agent, if it starts, takes this one's place
                last = time.monotonic()
                if os.fork() == 0:
                    listener.close()
                    self._become(line, variables[1])

    def _heard(self, line: socket.socket) -> tuple[list[str], dict[bytes, bytes]] | None:
        """Return an order's keys and environment; None if the peer is not accepted or is silent."""
        try:
            line.settimeout(_HANDSHAKE)
            if not is_accepted(line):
                return None
            keys, _, rest = line.recv(_LONGEST).partition(b"\0\0")
        except OSError:
            return None
        pairs = (one.partition(b"=") for one in rest.split(b"\0") if one)
        words = [key.decode(errors="replace") for key in keys.split(b"\0")]
        return words, {name: value for name, _, value in pairs}

    def _become(self, line: socket.socket, variables: dict[bytes, bytes]) -> NoReturn:
        """Carry out one order, in a new process."""
        status = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with suppress(OSError):
                Path("/proc/self/comm").write_text("vmckpt-agent")
            os.setsid()
            line.settimeout(_HANDSHAKE)
            line.send(relay_order.ACCEPTED)
            _, descriptors, _, _ = socket.recv_fds(line, 1, 3)
            if len(descriptors) == 3:  # otherwise, the peer has given up
                _take_over(descriptors)
                _adopt(variables)
                status = self.carry_out()
                line.send(bytes([status]))
        finally:
            os._exit(status)


def is_accepted(line: socket.socket) -> bool:
    """Return whether a peer is root, in the namespaces of this process."""
    told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, relay_order.CREDENTIALS)
    pid, uid = (int.from_bytes(told[at : at + 4], sys.byteorder) for at in (0, 4))
    if uid != 0:
        return False
    try:
        return all(
            Path(f"/proc/{pid}/ns/{name}").readlink() == Path(f"/proc/self/ns/{name}").readlink()
            for name in _NAMESPACES
        )
    except OSError:  # the peer has exited, or is in another PID namespace
        return False


def _adopt(variables: dict[bytes, bytes]) -> None:
    """Take over an environment, except for variables of Python, which only its start reads."""
    own = {name: value for name, value in os.environb.items() if name.startswith(b"PYTHON")}
    theirs = {name: value for name, value in variables.items() if not name.startswith(b"PYTHON")}
    os.environb.clear()
    os.environb.update(theirs | own)


def finish(status: int) -> NoReturn:
    """End this process with `status`. Unlike `sys.exit`, does not spend 0.2 s on freeing memory."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
