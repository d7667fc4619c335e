"""A lab without a lease store, whose alpha has a fence agent."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.bench import WHOLE, Bench, traces, until
from tests.lab.protecting import epochs
from vmckpt_lab import guests, host, lab
from vmckpt_lab.processes import Census

GUEST: dict[str, Any] = {
    "memory": "160MiB", "dirty": "32MiB@10MiB/s", "disk": "32MiB",
}  # fmt: skip
SECRET = "correct-horse"
SOON = 40.0
# As a management controller does it: neither the host nor its network is asked.
AGENT = """\
#!{python}
import sys, time
from pathlib import Path
from vmckpt_lab import host, lab, network

options = dict(line.rstrip("\\n").split("=", 1) for line in sys.stdin)
if options["password"] != {secret!r}:
    sys.exit("Unable to connect/login to fencing device")
one = lab.load(options["lab"]).host(options["plug"])
mode = Path({mode!r}).read_text()
with Path({calls!r}).open("a") as calls:
    calls.write(options["action"] + "\\n")
outlet = Path({tmp!r}, "outlet" + options.get("outlet", ""))
if options["action"] == "off":
    if mode in ("fails", "stuck") and options.get("outlet") != "1":
        sys.exit("Failed: Timed out waiting to power OFF " + options["password"])
    outlet.touch()
    others = int(options.get("outlets", 1)) - len(list(outlet.parent.glob("outlet*")))
    if mode != "lies" and not others:
        host.power_off(one)
    sys.exit(0)
while Path({mode!r}).read_text() == "hangs":
    time.sleep(0.05)
if "outlet" in options:
    sys.exit(2 if outlet.exists() else 0)
sys.exit(0 if network.processes_in(one.namespace) else 2)
"""


@dataclass(frozen=True)
class Fencing(Bench):
    """A lab whose alpha has a fence agent."""

    tmp: Path

    def behaves(self, mode: str) -> None:
        """ "works", "fails", "stuck" (all but the first outlet), "lies" (off does nothing), or
        "hangs" (its status)."""
        (self.tmp / "mode").write_text(mode)

    @property
    def actions(self) -> list[str]:
        path = self.tmp / "calls"
        return path.read_text().split() if path.exists() else []

    def furnish(self) -> None:
        """Give alpha its agent, whose password is in a file."""
        agent, password = self.tmp / "fence_lab", self.tmp / "password"
        mode, calls = str(self.tmp / "mode"), str(self.tmp / "calls")
        words = {"secret": SECRET, "mode": mode, "calls": calls, "tmp": str(self.tmp)}
        agent.write_text(AGENT.format(python=sys.executable, **words))
        agent.chmod(0o755)
        password.write_text(f"{SECRET}\n")
        password.chmod(0o600)
        options = f"{{lab: {self.plan.name}, plug: alpha, password_file: {password}}}"
        entry = f"  alpha:\n    fence: {{agent: {agent}, options: {options}}}\n"
        text = self.plan.inventory.read_text()
        self.plan.inventory.write_text(text.replace("  alpha:\n", entry, 1))

    @contextmanager
    def two_supplies(self) -> Iterator[None]:
        """Meanwhile alpha has two levels: a controller that is gone, then two power supplies."""
        before = self.plan.inventory.read_text()
        common = f"lab: {self.plan.name}, plug: alpha, password_file: {self.tmp / 'password'}"
        outlets = [
            f"{{agent: {self.tmp / 'fence_lab'}, options: {{{common}, outlet: '{number}',"
            " outlets: '2'}}"
            for number in (1, 2)
        ]
        gone = "{agent: fence_ipmilan, options: {ip: 127.0.0.1, ipport: '1', password: x}}"
        levels = f"    fence: {{levels: [[{gone}], [{', '.join(outlets)}]]}}\n"
        lines = before.splitlines(keepends=True)
        with_levels = [levels if line.startswith("    fence:") else line for line in lines]
        self.plan.inventory.write_text("".join(with_levels))
        try:
            yield
        finally:
            self.plan.inventory.write_text(before)

    def copies(self) -> list[str]:
        """Hosts that have a QEMU of the guest, the standby's too."""
        return [one.host for one in Census(self.plan).copies("web1")]

    def runs(self, seconds: float = 2.0) -> list[str]:
        """Hosts on which the guest's CPUs do anything meanwhile."""
        census = Census(self.plan)
        before = {one: census.ran(one) for one in census.copies("web1")}
        time.sleep(seconds)
        return [one.host for one, ran in before.items() if census.ran(one) - ran > 50_000_000]

    @property
    def powered(self) -> bool:
        return host.is_up(self.plan.host("alpha"))

    def no_secret(self) -> None:
        """Neither the journal nor any log of the lab has the password."""
        for one in self.plan.folder.rglob("*"):
            if one.is_file() and one.stat().st_size < 16 << 20 and "snapshots" not in one.parts:
                assert SECRET.encode() not in one.read_bytes(), one


@contextmanager
def fenced_lab(folder: Path) -> Iterator[Fencing]:
    """One, of which nothing is left in the end."""
    name = f"d{os.getpid()}"
    plan = lab.up(name, hosts=2)
    made = Fencing(plan, folder)
    made.furnish()
    yield made
    lab.down(name)
    assert traces(f"{name}/") + traces(f"{name}.") == []


@contextmanager
def protected(bench: Fencing, *words: str) -> Iterator[Fencing]:
    """web1 of alpha has a standby on beta; afterwards all hosts are healed, and it is gone."""
    bench.behaves("works")
    for path in (bench.tmp / "calls", *bench.tmp.glob("outlet*")):
        path.unlink(missing_ok=True)
    bench.guest(**GUEST)
    bench.good("protect", "web1", "--to", "beta", "--interval", "200ms", *words)
    # Its standby is ready, and has followed for some epochs.
    epochs(bench)
    yield bench
    for one in bench.plan.hosts:
        lab.heal(bench.plan, one.name)
    bench.run("unprotect", "web1")
    bench.run("recover")
    for guest in guests.stored(bench.plan):
        guests.remove(bench.plan, guest.name)


def goes_on(pair: Fencing, since: float) -> None:
    """The guest runs on beta and nowhere else, with all that it has ever told."""
    until(lambda: (pair.seen().answered_at or 0) > since, limit=SOON)
    assert not pair.powered
    assert pair.copies() == ["beta"]
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE
