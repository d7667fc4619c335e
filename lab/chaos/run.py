"""Run the operations of `chaos.plan`, and check the lab after each, until a check fails."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vmckpt.errors import LabError, VmckptError
from vmckpt.units import parse_rate
from vmckpt_lab import guests, network
from vmckpt_lab.chaos import plan as chaos_plan
from vmckpt_lab.chaos.plan import Operation
from vmckpt_lab.faults import trial
from vmckpt_lab.faults.scenarios import FAULTS, Fault, Scene
from vmckpt_lab.faults.trial import Told
from vmckpt_lab.history.recorder import Recorder
from vmckpt_lab.invariants import Checker, Lookout
from vmckpt_lab.lab import Say
from vmckpt_lab.plan import LabPlan

EVIDENCE = Path("/var/tmp")
# Number of operations between two checks of the other guests' ledgers.
_AUDIT_ALL = 20


class Wrong(VmckptError):
    """An operation violated an invariant."""

    exit_code = LabError.exit_code

    def __init__(self, operation: Operation, troubles: Iterable[str]) -> None:
        self.operation = operation
        self.troubles = tuple(troubles)
        super().__init__(f"operation {operation}: {'; '.join(self.troubles)}")


@dataclass(slots=True, kw_only=True)
class Tally:
    """The totals of a campaign."""

    seed: int
    operations: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    """Number of times that each fault was injected."""
    moments_hit: Counter[str] = field(default_factory=Counter)
    moments_missed: Counter[str] = field(default_factory=Counter)
    """Missed phases: the migration had passed the phase, was over, or never reached it."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of operations by reported outcome; without one, by exit code or "killed"."""
    rightly_gone: int = 0
    """Number of guests that were lost with their host or QEMU, as expected, with intact disks."""
    histories: int = 0
    """Histories of clients that were checked for linearizability, one per operation."""
    history_operations: int = 0
    """Number of client operations in these histories that were answered."""
    histories_unknown: int = 0
    """Histories that could not be checked within the limits."""
    histories_broken: int = 0
    ledgers_lost: int = 0
    two_copies_seen: int = 0
    unknown_states_left: int = 0
    other_troubles: int = 0
    failed: str | None = None

    def as_json(self) -> dict[str, Any]:
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**told, "seconds": round(self.seconds, 1)}

    def blame(self, troubles: Iterable[str]) -> None:
        """Count each violation under its kind, which its text shows."""
        for one in troubles:
            if one.startswith("history: "):
                self.histories_broken += 1
            elif "ledger" in one or "records on its disk" in one or "its disk contains" in one:
                self.ledgers_lost += 1
            elif "and so does" in one:
                self.two_copies_seen += 1
            elif "recover exited" in one or "still active" in one or "QEMU processes" in one:
                self.unknown_states_left += 1
            else:
                self.other_troubles += 1


class Campaign:
    """Runs operations in a lab. Use as a context manager, which creates and removes the guests."""

    def __init__(self, plan: LabPlan, seed: int, say: Say, *, journal: str | None = None) -> None:
        """`journal`: VMCKPT_JOURNAL of the controllers; None: a file in the lab's directory."""
        self._plan = plan
        self._seed = seed
        self._say = say
        self._journal = journal
        self._checker = Checker(plan)
        self._lookout = Lookout(plan)
        self._state = plan.folder / "chaos"
        self._names = [host.name for host in plan.hosts]
        self.tally = Tally(seed=seed)

    def __enter__(self) -> "Campaign":
        shutil.rmtree(self._state, ignore_errors=True)
        for number, wish in enumerate(chaos_plan.guests(self._seed)):
            on = self._names[number % len(self._names)]
            guests.start(
                self._plan, wish.name, on, memory=wish.memory, dirty=wish.dirty, disk="8MiB"
            )
        self._lookout.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._lookout.__exit__(None, None, None)
        for wish in chaos_plan.guests(self._seed):
            guests.remove(self._plan, wish.name)

    def run(self, operation: Operation) -> None:
        """Run an operation and check the lab. Raises Wrong if an invariant is violated."""
        began = time.monotonic()
        homes = {
            wish.name: self._home(operation, wish.name) for wish in chaos_plan.guests(self._seed)
        }
        scene = self._scene(operation, homes[operation.guest])
        injury = FAULTS[operation.fault](scene)
        told: Told | None = None
        gone = False
        try:
            injury.prepare()
            with Recorder(self._plan, operation.guest, seed=operation.number) as recorder:
                told = trial.play(
                    scene,
                    injury,
                    operation.moment,
                    delay=operation.delay,
                    inside=operation.inside,
                    cancel=operation.cancel,
                )
                told = trial.recovered(scene, told)
                ends = chaos_plan.ends(operation, hit=told.hit)
                verdict = trial.check_trial(scene, told, ends, self._checker)
                gone = verdict.gone
                wrong = verdict.wrong + self._bystanders(operation, scene, homes)
                wrong += self._history(recorder)
        except VmckptError as exc:
            wrong = [str(exc)]
        finally:
            injury.clear()
        wrong += self._lookout.two_copies()
        self._count(operation, told, gone, time.monotonic() - began)
        if wrong:
            self.tally.blame(wrong)
            self._keep(operation, scene, told, wrong)
            raise Wrong(operation, wrong)

    def _history(self, recorder: Recorder) -> list[str]:
        """Return the violations in the history that clients recorded."""
        recorder.stop()
        found = recorder.check(EVIDENCE)
        self.tally.histories += 1
        self.tally.history_operations += found.answered
        self.tally.histories_unknown += bool(found.unknown)
        for one in found.unknown:
            self._say(f"    history not checked: {one}")
        return list(found.wrong)

    def _home(self, operation: Operation, guest: str) -> str:
        places = self._checker.places(guest)
        if len(places) != 1:
            raise Wrong(
                operation, [f"{guest} was on {' and '.join(places) or 'no host'} at the start"]
            )
        return places[0]

    def _scene(self, operation: Operation, source: str) -> Scene:
        target = chaos_plan.target(self._names, source, operation.further)
        rate = parse_rate(operation.link) if operation.link else None
        for name in self._names:
            network.shape(self._plan, name, rate)
        path = self._plan.folder / "chaos.yaml"
        path.write_text(chaos_plan.policy(operation))
        return Scene(
            plan=self._plan,
            guest=operation.guest,
            source=source,
            target=target,
            other=next(name for name in self._names if name not in (source, target)),
            order=("--json", "--policy", str(path)),
            state=self._state,
            more={"VMCKPT_JOURNAL": self._journal} if self._journal else {},
        )

    def _bystanders(self, operation: Operation, scene: Scene, homes: dict[str, str]) -> list[str]:
        """Return the violations of the other guests.

        Each must be on the same host as before, or be lost with a host that was powered off.
        """
        off = {Fault.SOURCE_OFF: scene.source, Fault.TARGET_OFF: scene.target}.get(operation.fault)
        wrong: list[str] = []
        for guest, home in homes.items():
            if guest == operation.guest:
                continue
            places = self._checker.places(guest)
            if home == off and not places:
                self.tally.rightly_gone += 1
                wrong += self._checker.image(guest, home) + self._checker.revive(guest, home)
            elif places != [home]:
                wrong.append(
                    f"{guest}, another guest, was on {home} and is now on {places or 'no host'}"
                )
            elif operation.number % _AUDIT_ALL == 0:
                wrong += self._checker.ledgers(guest)
        return wrong

    def _count(self, operation: Operation, told: Told | None, gone: bool, seconds: float) -> None:
        tally = self.tally
        tally.operations += 1
        tally.seconds += seconds
        if told is None:
            return
        if told.hit:
            tally.faults[operation.fault] += 1
        (tally.moments_hit if told.hit else tally.moments_missed)[operation.moment] += 1
        outcome = told.end.said if told.end else "killed"
        tally.outcomes[outcome] += 1
        tally.rightly_gone += gone
        hit = "hit" if told.hit else "missed"
        way = f"{outcome}, {'lost as expected, ' if gone else ''}{hit}"
        self._say(f"{operation}: {way}, {seconds:.1f} s")
        if told.end is not None and told.end.outcome is None:
            self._say(f"    {told.end.last_words}")

    def _keep(
        self, operation: Operation, scene: Scene, told: Told | None, wrong: Iterable[str]
    ) -> None:
        """Save the evidence of a violation: journal, logs and the state of the guest."""
        folder = EVIDENCE / f"vmckpt-chaos-{self._seed}-{operation.number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if scene.state.is_dir():
            shutil.copytree(scene.state, folder / "journal", ignore_dangling_symlinks=True)
        for host in self._plan.hosts:
            shutil.copytree(host.root / "log", folder / host.name)
        ends = [*([told.end, told.recovered] if told else []), *(told.others if told else ())]
        story = {
            "operation": asdict(operation),
            "source": scene.source,
            "target": scene.target,
            "wrong": list(wrong),
            "seen": [asdict(one) for one in self._checker.look(operation.guest)],
            "commands": [asdict(end) for end in ends if end is not None],
        }
        (folder / "story.json").write_text(json.dumps(story, indent=2, default=str))
        self._say(f"evidence saved to {folder}")


def replay_command(seed: int, first: int, operation: Operation, *, postgres: bool) -> str:
    """Return the command that repeats a campaign up to this operation.

    `first`: number of its first operation; `postgres`: the journal is in PostgreSQL.
    """
    count = operation.number - first + 1
    begin = f" --first {first}" if first > 1 else ""
    return f"vmckpt lab chaos --seed {seed}{begin} --operations {count}" + " --postgres" * postgres
