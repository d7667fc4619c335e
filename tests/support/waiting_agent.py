"""An agent with orders for tests. With `python -m`, it starts as an agent does on a host.

    python -m tests.support.waiting_agent KEY SECONDS SOURCE

An order is one line: `ids` prints the IDs of this process and its parent, and a variable; `fail`
exits with status 3; `crash` kills the process; `hold FILE` waits until its input ends, and creates
FILE. SOURCE is a file that stands for vmckpt's modules.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from vmckpt.agent import waiting

ROOT = Path(__file__).parents[2]
KEY = "installed 1.0"
RELAY = resources.files("vmckpt.remote.scripts").joinpath("relay_order.py").read_text()


def carry_out() -> int:
    words = sys.stdin.readline().split()
    if words[0] == "ids":
        said = {"pid": os.getpid(), "parent": os.getppid(), "fruit": os.environ.get("FRUIT")}
        _say(json.dumps({**said, "safe": os.environ.get("PYTHONSAFEPATH")}))
    elif words[0] == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif words[0] == "fail":
        sys.stderr.write("it failed\n")
        return 3
    elif words[0] == "hold":
        _say(str(os.getpid()))
        sys.stdin.read()
        Path(words[1]).touch()
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class WaitingHost:
    """A host with its own /run, as a mount namespace."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        self.source.touch()
        self._shell = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o mode=755 tmpfs /run; echo; read _"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._shell.stdout is not None
        self._shell.stdout.readline()
        self._namespace = Path(f"/proc/{self._shell.pid}/ns/mnt").readlink()

    def close(self) -> None:
        """End what runs on the host."""
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        self._shell.communicate()

    def processes(self, name: str | None = None) -> list[int]:
        """Return the processes on the host, without its shell. `name`: only those named so."""
        found = []
        for one in Path("/proc").glob("[0-9]*"):
            try:
                there = (one / "ns/mnt").readlink() == self._namespace
                named = name is None or (one / "comm").read_text().strip() == name
                zombie = (one / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if there and named and not zombie and int(one.name) != self._shell.pid:
                found.append(int(one.name))
        return found

    @property
    def waiting(self) -> list[int]:
        """Processes that wait for orders."""
        return self.processes("vmckpt-waiting")

    def popen(self, *words: str, **variables: str) -> "subprocess.Popen[str]":
        """Start a command on the host."""
        return subprocess.Popen(
            ["nsenter", "-t", str(self._shell.pid), "-m", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **variables},
        )  # fmt: skip

    def first(self, order: str = "ids", *, key: str = KEY, seconds: float = 60.0) -> str:
        """Start an agent for a first order. Returns its output, once a process waits."""
        before = self.waiting
        words = ("-m", "tests.support.waiting_agent", key, str(seconds), str(self.source))
        variables = {"PYTHONSAFEPATH": "", "PYTHONPATH": str(ROOT)}
        agent = self.popen(sys.executable, *words, **variables)
        out, err = agent.communicate(f"{order}\n", timeout=60.0)
        assert agent.returncode == 0, err
        until(lambda: self.waiting not in ([], before) and len(self.waiting) == 1)
        return out

    def relay(self, *keys: str, **variables: str) -> "subprocess.Popen[str]":
        """Start the relay, as an ssh session does."""
        words = (sys.executable, "-I", "-S", "-c", RELAY, *(keys or (KEY,)))
        return self.popen(*words, **variables)

    def order(self, order: str, *keys: str, **variables: str) -> tuple[int, str, str]:
        """Give an order to the agent that waits. Returns exit status, output and errors."""
        relay = self.relay(*keys, **variables)
        out, err = relay.communicate(f"{order}\n", timeout=30.0)
        return relay.returncode, out, err


def until(condition: Callable[[], bool], limit: float = 20.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def main() -> None:
    key, seconds, source = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])

    def sources() -> waiting.Sources:
        seen = source.stat()
        return frozenset({(str(source), seen.st_mtime_ns, seen.st_size, seen.st_ino)})

    waiting.sources = sources
    waiting._LOOKS = 0.1
    waiting.leave_behind(key, seconds, sources(), carry_out)
    waiting.finish(carry_out())


if __name__ == "__main__":
    main()
