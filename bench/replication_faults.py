"""Inject faults at each step of a protection's life: never two copies, and nothing lost.

    sudo .venv/bin/python -m bench.replication_faults 300 [--seed 1] [--json FILE [--more]]
        [--only signals|one-way|clock|lost-commit|card|host] [--ttl 3] [--keep-going]

Each round has a running guest, a lease store and automatic failover. The round's seed determines a
step and a fault. The process that reaches the step is stopped there (bench/points.py), and then one
of these faults is injected:

* SIGKILL or SIGSTOP for any of the agent, the watchdog, libvirtd and the disk log, or for the undo
  process of a snapshot
* a network that drops all packets in one direction
* a wall clock that jumps by an hour
* a lease store that fails over to a replica without the last commits
* a network card that is plugged in or unplugged
* a host that loses power or its cables, freezes, or loses its QEMU.

After the fault is repaired, `vmckpt recover` and `unprotect` clean up. Then these invariants must
hold:

* two copies of the guest never ran or sent packets at the same time
* the guest's memory, disk and output agree
* a single copy could have given the answers that the clients of its key-value store received in the
  round (lab/history/recorder.py)
* the guest is running, unless its host died without a valid standby
* nothing of the protection is left.

The first violation ends the campaign; its row contains the agents' logs and the commands' output.
With --more, the campaign continues after the rounds in the file.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import faults_checks
from bench.faults_acts import Strike, attach, cards, detach, end, other
from bench.faults_checks import TapWatch
from bench.faults_plan import Kind, Round, Way, round_of
from bench.faults_scene import GUEST, HOSTS, Command, Done, Scene, begin, heal, scene
from vmckpt.errors import LabError, VmckptError
from vmckpt_lab import guests, host
from vmckpt_lab.chaos.run import EVIDENCE
from vmckpt_lab.faults.inject import send
from vmckpt_lab.history.recorder import Recorder
from vmckpt_lab.invariants import Lookout
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.shell import run

_ROOT = Path(__file__).parents[1]
_REACHED: dict[Way, float] = {
    Way.BEGINNING: 25.0, Way.EPOCH: 8.0, Way.ALONE: 15.0, Way.TAKEOVER: 15.0, Way.SWITCH: 15.0,
    Way.ENDING: 15.0, Way.SNAPSHOT: 20.0,
}  # fmt: skip
"""Seconds within which a step is reached."""
_QUIET = 1.0
"""Seconds after a fault during which nothing is queried."""
_HEARD = 20.0
_BACK = 15.0
"""Seconds within which a protection must be ready again; otherwise it is ended."""


class Violated(Exception):
    """An invariant was violated. `row` contains the evidence."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        super().__init__("; ".join(row["violations"]))


@dataclass
class Told:
    """The events of a round."""

    hit: bool = False
    struck: list[str] = field(default_factory=list)
    lease: dict[str, str] = field(default_factory=dict)
    """The lease when the fault was injected."""
    at: float = 0.0
    """Time at which the fault was injected, in monotonic seconds."""
    behind_s: float | None = None
    command: Command | None = None
    """The command that led to the step, and may still be running."""
    needed: str = "nothing"
    """The command after which the guest answered again."""
    gone: bool = False
    """Whether the guest was lost, as expected."""
    commands: list[Done] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class Campaign:
    """Runs rounds in a lab, with the same guest until the guest is lost."""

    def __init__(self, made: Scene, ttl: float) -> None:
        self._scene, self._ttl = made, ttl
        self._home: str | None = None
        self._kept = False
        """Whether the guest is still protected from an earlier round."""

    def play(self, chosen: Round) -> dict[str, Any]:
        """Run a round. Raises Violated."""
        began = time.monotonic()
        if self._home is None:
            self._home = HOSTS[chosen.seed % 2]
            begin(self._scene, self._home)
        primary, told = self._home, Told()
        logs: dict[str, str] = {}
        plan = self._scene.plan
        with (
            Lookout(plan) as lookout, TapWatch(self._scene) as taps,
            Recorder(plan, GUEST, clients=4, seed=chosen.seed) as recorder,
        ):  # fmt: skip
            try:
                self._play(chosen, primary, told)
                logs = self._scene.logs()
                self._mended(chosen, told)
                self._in_order(chosen, told)
            except VmckptError as exc:
                told.violations.append(f"the round failed: {exc}")
            told.violations += lookout.two_copies()
            try:
                recorder.stop()
            except LabError as exc:
                told.violations.append(f"the clients' history is incomplete: {exc}")
            history = recorder.check(EVIDENCE)
        told.violations += [*taps.speakers.seen, *history.wrong]
        self._next(told)
        row = {
            **chosen.as_json(), "hit": told.hit, "struck": told.struck, "lease": told.lease,
            "home": [primary, self._home], "needed": told.needed, "gone": told.gone,
            "behind_s": told.behind_s, "kept": self._kept, "packets": taps.speakers.packets,
            "operations": history.answered, "undecided": list(history.unknown),
            "commands": [str(one) for one in told.commands],
            "took_s": round(time.monotonic() - began, 1),
        }  # fmt: skip
        if told.violations:
            row |= {
                "violations": told.violations, "logs": logs, "logs_after": self._scene.logs(),
            }  # fmt: skip
            raise Violated(row)
        return row

    def _play(self, chosen: Round, primary: str, told: Told) -> None:
        """Bring the protection to the step, inject the fault, and wait for its effects."""
        made, backup = self._scene, other(primary)
        at = backup if chosen.place.backup else primary
        if chosen.place.way in (Way.BEGINNING, Way.SNAPSHOT) or chosen.plugs is False:
            self._end_kept(told)
        with ExitStack() as stack:
            if chosen.plugs is False:
                plug(made, primary, 1)
            told.command = self._approach(chosen, primary, told)
            stopped = made.stopped(at, _REACHED[chosen.place.way])
            told.hit, told.lease, told.at = stopped is not None, made.lease(), time.monotonic()
            strike = Strike(made, chosen, primary, backup, at, stopped)
            stack.callback(strike.over)
            strike()
            told.struck = strike.struck
            self._until_quiet(chosen, told)

    def _approach(self, chosen: Round, primary: str, told: Told) -> Command | None:
        """Arm the step and cause it to be reached. Returns the running command, if any."""
        made, backup, way = self._scene, other(primary), chosen.place.way
        at = backup if chosen.place.backup else primary
        forgets = chosen.kind is Kind.LOST_COMMIT
        if way is Way.BEGINNING:
            made.arm(at, "lease armed" if forgets else chosen.step)
            command = made.protect(backup)
            if forgets:  # the replica has the beginning of the lease
                self._held_back(made.stopped(at, _REACHED[way]), at, chosen.step)
            return command
        if way is Way.SNAPSHOT:
            made.run("snapshot", "init")  # fails if the store already exists
            made.arm(at, chosen.step)
            return made.start("snapshot", "create", GUEST)
        self._protect(backup, told)
        if forgets:
            made.pair.caught_up()
            made.pair.hold_back()
        time.sleep(chosen.delay)
        made.arm(at, chosen.step)
        if way is Way.ALONE:
            Strike(made, chosen, primary, backup, at, None).mute("primary", "backup")
        elif way is Way.TAKEOVER:
            end(made, primary, chosen.end)
        elif way is Way.SWITCH:
            return made.start("failover", GUEST, "--planned", "--json")
        elif way is Way.ENDING:
            return made.start("unprotect", GUEST, "--json")
        return None

    def _held_back(self, process: int | None, at: str, step: str) -> None:
        """Hold the lease store's replica back, and resume the process until the step."""
        made = self._scene
        made.pair.caught_up()
        made.pair.hold_back()
        made.arm(at, step)
        if process is not None:
            send(process, signal.SIGCONT)

    def _protect(self, backup: str, told: Told) -> None:
        """Protect the guest, unless it is still protected. Raises LabError."""
        if self._kept:
            return
        done = self._scene.protect(backup).end()
        if done.code != 0:
            told.commands.append(done)
            raise LabError(f"the guest cannot be protected: {done}")

    def _end_kept(self, told: Told) -> None:
        """End the protection of earlier rounds. Raises LabError if that fails."""
        if self._kept:
            self._kept = False
            done = self._scene.run("unprotect", GUEST)
            told.commands.append(done)
            if done.code != 0 or (found := self._left()):
                raise LabError(f"{done}; left: {found if done.code == 0 else 'not looked for'}")

    def _until_quiet(self, chosen: Round, told: Told) -> None:
        """Wait until the guest answers again, or should have answered long ago."""
        quiet = told.at + max(_QUIET, chosen.seconds + 0.5)
        give_up = quiet + 2.5 * self._ttl + 2.0
        while (now := time.monotonic()) < give_up:
            if now > quiet and self._scene.heard(max(quiet, now - 0.5)):
                return
            time.sleep(0.05)

    def _heard(self, limit: float) -> bool:
        """Return whether the guest answers within `limit` seconds."""
        since, give_up = time.monotonic(), Deadline(limit)
        while not self._scene.heard(since):
            if give_up.passed():
                return False
            time.sleep(0.05)
        return True

    def _mended(self, chosen: Round, told: Told) -> None:
        made = self._scene
        made.disarm()
        heal(made)
        if chosen.kind is Kind.LOST_COMMIT:
            made.pair.follow()
        if told.command is not None:
            done = told.command.end()
            told.commands.append(done)
            if done.code is None:
                told.violations.append(f"the command did not exit: {done}")

    def _in_order(self, chosen: Round, told: Told) -> None:
        """Do what an operator does: recover, fail over if necessary, and clean up."""
        made = self._scene
        heard = self._heard(self._ttl + 2.0)
        outcomes = [text for name, text in made.logs().items() if name.endswith("outcome.json")]
        behind = [json.loads(one).get("behind_s") for one in outcomes]
        told.behind_s = next((one for one in behind if one is not None), None)
        for words in (("recover", "--json"), ("failover", GUEST, "--json"), ("unprotect", GUEST)):
            if not heard:
                told.needed = words[0]
                told.commands.append(made.run(*words))
                heard = self._heard(_HEARD)
        if not heard and not self._may_be_gone(chosen, told):
            told.violations.append(f"the guest is lost; hosts with a QEMU: {self._copies()}")
        told.gone = not heard
        self._kept = not told.gone and told.needed == "nothing" and self._goes_on()
        if not self._kept:
            self._end(told)
        self._check(told)

    def _goes_on(self) -> bool:
        """Return whether the guest is protected as before, and can be used in the next round."""
        made, copies = self._scene, self._copies()
        give_up = Deadline(_BACK)
        if self._home is None or len(copies) < 2 or len(cards(made, self._home)) != 1:
            return False
        while not give_up.passed():
            ours, theirs = made.asked(self._home), made.asked(other(self._home))
            if ours.get("phase") == "protecting" and theirs.get("ready"):
                return bool(made.lease().get("state") == "protected")
            if not ours.get("phase") or theirs.get("outcome"):
                return False
            time.sleep(0.1)
        return False

    def _may_be_gone(self, chosen: Round, told: Told) -> bool:
        """Return whether the guest's host was lost, and no standby could take over."""
        lost = chosen.kind is Kind.HOST and chosen.injury in ("power", "QEMU killed")
        return lost and told.lease.get("state") != "protected"

    def _copies(self) -> list[str]:
        return [name for name in HOSTS if self._scene.qemus(name)]

    def _end(self, told: Told) -> None:
        """Recover and unprotect, twice if needed: the first attempt may only observe the state."""
        for _ in range(2):
            for words in (("recover", "--json"), ("unprotect", GUEST)):
                told.commands.append(self._scene.run(*words))
                if not self._left():
                    return

    def _left(self) -> list[str]:
        homes = self._copies()
        return faults_checks.left(self._scene, homes[0] if len(homes) == 1 else None)

    def _check(self, told: Told) -> None:
        """Check the invariants. Raises VmckptError."""
        made, copies = self._scene, self._copies()
        if len(copies) > 1 and not self._kept:
            told.violations.append(f"QEMU processes remain on {' and '.join(copies)}")
        if told.gone:
            return
        running = faults_checks.runs_on(made)
        if len(running) != 1:
            told.violations.append(f"the guest runs on {running or 'no host'}")
        if not self._kept:
            told.violations += [f"left: {one}" for one in self._left()]
        told.violations += faults_checks.ledgers(made)

    def _next(self, told: Told) -> None:
        """Prepare the guest for the next round, or remove it."""
        made, copies = self._scene, self._copies()
        if self._kept and not told.violations:
            return
        self._kept = False
        self._home = copies[0] if len(copies) == 1 and not told.violations else None
        if self._home is not None and not plug(made, self._home, 0):
            self._home = None
        if self._home is None:
            if not told.violations:
                guests.remove(made.plan, GUEST)
            return
        for name in HOSTS:  # images of former standbys and guests
            for image in (made.plan.host(name).root / "private").glob(f"{GUEST}-*.raw"):
                if name != self._home or str(image.name) not in disks(made, name):
                    image.unlink()


def plug(made: Scene, on: str, more: int) -> bool:
    """Plug or unplug cards until the guest has `more` besides its first. Returns the success."""
    give_up = Deadline(15.0)
    while (found := cards(made, on)) and len(found) - 1 != more:
        if give_up.passed():
            return False
        words = attach() if len(found) - 1 < more else detach(found[-1])
        run(host.enter(made.plan.host(on), *words), check=False)
        time.sleep(0.3)
    return True


def disks(made: Scene, on: str) -> str:
    """Return the guest's images on a host, as libvirt lists them."""
    return run(host.enter(made.plan.host(on), "virsh", "-q", "domblklist", GUEST), check=False)


def summary(rows: list[dict[str, Any]], ttl: float) -> dict[str, Any]:
    """Return the totals of all rounds."""
    clean = [one for one in rows if "violations" not in one]
    behind = sorted(one["behind_s"] for one in clean if one.get("behind_s") is not None)
    counted: dict[str, dict[str, int]] = {}
    for key in ("kind", "step", "how", "needed"):
        counted[f"by_{key}"] = dict(sorted(Counter(str(one.get(key)) for one in rows).items()))
    victims = Counter(", ".join(one["victims"]) for one in rows if one.get("victims"))
    return {
        "rounds": len(rows), "seeds": [rows[0]["seed"], rows[-1]["seed"]] if rows else [],
        "lease_s": ttl, "violations": len(rows) - len(clean),
        "steps_hit": sum(bool(one["hit"]) for one in rows),
        "failovers": sum(one["home"][0] != one["home"][1] for one in clean if one["home"][1]),
        "rightly_gone": sum(bool(one["gone"]) for one in clean),
        "behind_worst_s": behind[-1] if behind else None,
        "seconds": round(sum(one["took_s"] for one in rows), 1),
        **counted, "by_victims": dict(sorted(victims.items())),
    }  # fmt: skip


def main() -> None:
    """Run the rounds, print the totals and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--more", action="store_true", help="continue after the rounds in the file")
    parser.add_argument("--only", type=Kind, choices=list(Kind))
    parser.add_argument("--ttl", type=float, default=3.0, help="duration of a lease, in seconds")
    parser.add_argument("--keep-going", action="store_true", help="in a new lab, after a violation")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the lab is removed
    rows: list[dict[str, Any]] = []
    if chosen.more and chosen.json is not None and chosen.json.exists():
        rows = json.loads(chosen.json.read_text())["rounds"]
    first = max((one["seed"] + 1 for one in rows), default=chosen.seed)
    seeds = list(range(first, first + chosen.rounds))
    while seeds:
        name = f"bf{os.getpid()}"
        try:
            with scene(name, chosen.ttl) as made:
                campaign = Campaign(made, chosen.ttl)
                while seeds:
                    _one(campaign, round_of(seeds.pop(0), chosen.only), rows)
                    _keep(chosen.json, rows, chosen.ttl)
        except Violated:
            _keep(chosen.json, rows, chosen.ttl)
            if not chosen.keep_going:
                break
    sys.stdout.write(json.dumps(summary(rows, chosen.ttl), indent=1) + "\n")
    sys.exit(any("violations" in one for one in rows))


def _one(campaign: Campaign, round_: Round, rows: list[dict[str, Any]]) -> None:
    try:
        rows.append(campaign.play(round_))
    except Violated as exc:
        rows.append(exc.row)
        sys.stdout.write(f"{round_}: VIOLATION {exc}\n")
        raise
    told = {key: rows[-1][key] for key in ("hit", "struck", "home", "needed", "took_s")}
    sys.stdout.write(f"{round_}: {json.dumps(told)}\n")
    sys.stdout.flush()


def _keep(path: Path | None, rows: list[dict[str, Any]], ttl: float) -> None:
    if path is not None:
        told = json.dumps({"summary": summary(rows, ttl), "rounds": rows}, indent=1) + "\n"
        path.write_text(told.replace(f"{_ROOT}/", ""))  # tracebacks contain paths


if __name__ == "__main__":
    main()
