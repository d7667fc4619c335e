"""A fence agent as ClusterLabs describes them, whose device is a file: a program of its own."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vmckpt.model.fencing import FenceDevice, FenceTopology
from vmckpt.model.host import Host, SshAddress

SECRET = "hunter2 'n\\ so=on"
_AGENT = """\
#!{python} -IS
import json, os, signal, sys, time
from pathlib import Path

folder = Path({folder!r})
options = dict(line.rstrip("\\n").split("=", 1) for line in sys.stdin)
action = options["action"]
mode = json.loads((folder / "modes").read_text()).get(action, "works")
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps({{"action": action, "options": options, "argv": sys.argv[1:],
                            "pid": os.getpid()}}) + "\\n")
power = folder / "power"
if mode == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.fork()
    (folder / f"hangs-{{os.getpid()}}").touch()
    time.sleep(600)
if mode == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "tells":
    print(options, *options.values(), sep="\\n", flush=True)
    print("Unable to connect/login to fencing device", options, *options.values(),
          sep="\\n", file=sys.stderr)
    sys.exit(1)
if isinstance(mode, int):
    sys.exit(mode)
if action == "off":
    if mode != "lies":
        power.write_text("off")
    sys.exit(0)
if mode == "late":
    (folder / "modes").write_text("{{}}")
    sys.exit(0)
if mode == "returns" and power.read_text() == "off":
    power.write_text("on")
    sys.exit(2)
sys.exit(2 if power.read_text() == "off" else 0)
"""


class FakeAgent:
    """It, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.path = folder / "fence_fake"
        self.path.write_text(_AGENT.format(python=sys.executable, folder=str(folder)))
        self.path.chmod(0o755)
        (folder / "power").write_text("on")
        self.behaves()

    def behaves(self, **modes: str | int) -> None:
        """By action: "works", "lies" (off does nothing), "late" (on once more), "hangs", "dies",
        "tells" (all it knows), "returns" (off once, then on again), or the exit code."""
        (self._folder / "modes").write_text(json.dumps(modes))

    @property
    def power(self) -> str:
        return (self._folder / "power").read_text()

    @property
    def calls(self) -> list[dict[str, Any]]:
        path = self._folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def actions(self) -> list[str]:
        return [one["action"] for one in self.calls]

    def hanging(self) -> list[int]:
        """Processes of it that hung and live; a moment after it was ended there is none."""
        until = time.monotonic() + 2.0
        while True:
            pids = [int(one.name.removeprefix("hangs-")) for one in self._folder.glob("hangs-*")]
            alive = [pid for pid in pids if _lives(pid)]
            if not alive or time.monotonic() > until:
                return alive
            time.sleep(0.02)

    def host(
        self, options: Mapping[str, str] | None = None, *, agent: str | None = None,
        password_file: Path | None = None, ssh: SshAddress | None = None,
    ) -> Host:  # fmt: skip
        device = self.device(options, agent=agent, password_file=password_file)
        return host((device,), ssh=ssh)

    def device(
        self, options: Mapping[str, str] | None = None, *, agent: str | None = None,
        password_file: Path | None = None,
    ) -> FenceDevice:  # fmt: skip
        """It as an entry of the inventory."""
        given = {"ip": "10.9.0.11", "password": SECRET} if options is None else options
        return FenceDevice(
            agent=agent or str(self.path), options=MappingProxyType(dict(given)),
            password_file=password_file,
        )  # fmt: skip


def host(*levels: tuple[FenceDevice, ...], ssh: SshAddress | None = None) -> Host:
    """A host with these levels of devices."""
    topology = FenceTopology(levels)
    return Host(name="alpha", uri="qemu+tcp://alpha/system", fence=topology, ssh=ssh)


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
