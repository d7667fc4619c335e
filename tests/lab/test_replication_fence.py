"""Guests without a lease store, whose dead host is powered off before their standby runs."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench import WHOLE, Bench, traces, until
from vmckpt.lab import guests, host, lab, network
from vmckpt.lab.lookout import Lookout
from vmckpt.lab.processes import Census

GUEST: dict[str, Any] = {
    "memory": "160MiB", "dirty": "32MiB@10MiB/s", "shared_memory": True, "disk": "32MiB",
}  # fmt: skip
SECRET = "correct-horse"
SOON = 40.0
# As a management controller does it: neither the host nor its network is asked.
AGENT = """\
#!{python}
import sys, time
from pathlib import Path
from vmckpt.lab import host, lab, network

options = dict(line.rstrip("\\n").split("=", 1) for line in sys.stdin)
if options["password"] != {secret!r}:
    sys.exit("Unable to connect/login to fencing device")
one = lab.load(options["lab"]).host(options["plug"])
mode = Path({mode!r}).read_text()
with Path({calls!r}).open("a") as calls:
    calls.write(options["action"] + "\\n")
if options["action"] == "off":
    if mode == "fails":
        sys.exit("Failed: Timed out waiting to power OFF " + options["password"])
    if mode != "lies":
        host.power_off(one)
    sys.exit(0)
while Path({mode!r}).read_text() == "hangs":
    time.sleep(0.05)
sys.exit(0 if network.processes_in(one.namespace) else 2)
"""


@dataclass(frozen=True)
class Fencing(Bench):
    """A lab whose alpha has a fence agent."""

    tmp: Path

    def behaves(self, mode: str) -> None:
        """ "works", "fails", "lies" (off does nothing), or "hangs" (its status)."""
        (self.tmp / "mode").write_text(mode)

    @property
    def actions(self) -> list[str]:
        path = self.tmp / "calls"
        return path.read_text().split() if path.exists() else []

    def furnish(self) -> None:
        """Give alpha its agent, whose password is in a file."""
        agent, password = self.tmp / "fence_lab", self.tmp / "password"
        mode, calls = str(self.tmp / "mode"), str(self.tmp / "calls")
        agent.write_text(AGENT.format(python=sys.executable, secret=SECRET, mode=mode, calls=calls))
        agent.chmod(0o755)
        password.write_text(f"{SECRET}\n")
        password.chmod(0o600)
        options = f"{{lab: {self.plan.name}, plug: alpha, password_file: {password}}}"
        entry = f"  alpha:\n    fence: {{agent: {agent}, options: {options}}}\n"
        text = self.plan.inventory.read_text()
        self.plan.inventory.write_text(text.replace("  alpha:\n", entry, 1))

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


@pytest.fixture(scope="module")
def unleased(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fencing]:
    """A lab without a witness, for all tests here."""
    name = f"f{os.getpid()}"
    plan = lab.up(name, hosts=2)
    made = Fencing(plan, tmp_path_factory.mktemp("fence"))
    made.furnish()
    yield made
    lab.down(name)
    assert traces(f"{name}/") + traces(f"{name}.") == []


@pytest.fixture
def pair(unleased: Fencing) -> Iterator[Fencing]:
    unleased.behaves("works")
    (unleased.tmp / "calls").unlink(missing_ok=True)
    unleased.guest(**GUEST)
    words = ("--to", "beta", "--interval", "200ms", "--failover", "manual")
    unleased.good("protect", "web1", *words)
    time.sleep(2.0)
    yield unleased
    for one in unleased.plan.hosts:
        lab.heal(unleased.plan, one.name)
    unleased.run("unprotect", "web1")
    unleased.run("recover")
    for guest in guests.stored(unleased.plan):
        guests.remove(unleased.plan, guest.name)


def goes_on(pair: Fencing, since: float) -> None:
    """The guest runs on beta and nowhere else, with all that it has ever told."""
    until(lambda: (pair.seen().answered_at or 0) > since, limit=SOON)
    assert not pair.powered
    assert pair.copies() == ["beta"]
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE


@pytest.mark.long
def test_a_host_that_nobody_reaches_is_powered_off_before_its_guest_runs_elsewhere(
    pair: Fencing,
) -> None:
    (one,) = pair.good("status", "web1", "--json").json
    with Lookout(pair.plan) as lookout:
        network.cut(pair.plan, "alpha", guests_too=True)
        assert pair.runs() == ["alpha"]  # nobody knows, and it runs on
        done = pair.good("failover", "web1", "--json")
        goes_on(pair, time.monotonic())
        # The old host comes back, and has nothing that could run.
        lab.heal(pair.plan, "alpha")
        assert pair.runs() == ["beta"]
        assert pair.inside("alpha", "virsh", "list", "--all", "--name").split() == []
        assert lookout.two_copies() == []
        assert lookout.looks > 100
    assert pair.ledgers() == WHOLE
    told = done.json
    assert (told["runs_on"], told["fenced"]["host"], told["fenced"]["answered"]) == (
        "beta", "alpha", "off",
    )  # fmt: skip
    assert "fence_lab powers it off, with all that runs there" in done.err
    assert pair.actions == ["off", "status"]
    steps = pair.good("job", one["job"], "--json").json["steps"]
    (step,) = [one for one in steps if one["name"] == "fence"]
    assert (step["state"], step["result"]["answered"]) == ("done", "off")
    assert SECRET not in done.out + done.err + json.dumps(steps)
    pair.no_secret()


@pytest.mark.long
@pytest.mark.parametrize("mode", [pytest.param("fails", marks=pytest.mark.campaign), "lies"])
def test_a_host_that_may_be_on_keeps_its_guest(pair: Fencing, mode: str) -> None:
    pair.behaves(mode)
    with Lookout(pair.plan) as lookout:
        network.cut(pair.plan, "alpha", guests_too=True)
        refused = pair.run("failover", "web1")
        assert refused.code == 25
        assert "alpha is not known to be off" in refused.err
        assert "Traceback" not in refused.err
        assert SECRET not in refused.out + refused.err
        assert pair.powered
        assert pair.runs() == ["alpha"]
        # It was cut off for so long that it went on alone; its standby is brought up again.
        network.heal(pair.plan, "alpha")
        until(lambda: _phase(pair) == "protecting", limit=SOON)
        assert pair.runs() == ["alpha"]
        assert lookout.two_copies() == []
    assert pair.ledgers() == WHOLE
    pair.no_secret()


@pytest.mark.campaign
@pytest.mark.long
def test_a_controller_that_is_killed_in_between_is_followed_by_the_next(pair: Fencing) -> None:
    pair.behaves("hangs")
    with Lookout(pair.plan) as lookout:
        network.cut(pair.plan, "alpha", guests_too=True)
        first = pair.start("failover", "web1")
        until(lambda: "status" in pair.actions, limit=SOON)
        assert not pair.powered
        first.send_signal(signal.SIGKILL)
        first.communicate()
        assert pair.runs() == []
        pair.behaves("works")
        pair.good("failover", "web1")
        goes_on(pair, time.monotonic())
        assert lookout.two_copies() == []


@pytest.mark.campaign
def test_a_host_that_answers_is_powered_off_only_if_that_is_asked_for(pair: Fencing) -> None:
    found = pair.run("doctor", "alpha", "--json").json
    (fence,) = [one for one in found if one["code"] == "fence"]
    assert (fence["severity"], "says that it is on" in fence["text"]) == ("ok", True)
    refused = pair.run("failover", "web1")
    assert refused.code == 18
    assert "--fence powers it off first" in refused.err
    assert pair.powered
    assert pair.actions == ["status"]
    with Lookout(pair.plan) as lookout:
        pair.good("failover", "web1", "--fence")
        goes_on(pair, time.monotonic())
        assert lookout.two_copies() == []


def _phase(pair: Fencing) -> str | None:
    (one,) = pair.good("status", "web1", "--json").json
    phase = one["says"]["alpha"].get("phase")
    return None if phase is None else str(phase)
