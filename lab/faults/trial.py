"""A trial: a migration with a fault in a given phase, recovery, and a check of the result."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from vmckpt.model.migration import Outcome
from vmckpt_lab import command_runner, network
from vmckpt_lab.command_runner import End, Moment
from vmckpt_lab.faults.scenarios import Injury, Scene
from vmckpt_lab.invariants import Checker, HostCopy, truthful
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.processes import Census, QemuCopy

# Seconds, longer than every time limit of a controller. A controller that takes longer has hung.
PATIENCE = 150.0
_TO_THE_MOMENT = 40.0
# Nanoseconds of CPU time after which an arriving guest is certainly running.
_RUNS = 1_500_000
# Exit codes for an inventory or a policy that cannot be read.
_COMMAND_LINE = (3, 4)


class Ends(StrEnum):
    """How a trial may end."""

    STAYS = "intact on the source"
    MOVES = "intact on the target"
    LIVES = "intact, on the source or on a target"
    GONE = "lost, as expected; its disk is intact"
    LIVES_OR_GONE = "intact, or lost as expected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The events of a trial, before the result is checked."""

    hit: bool
    """Whether the fault was injected in its phase."""
    end: End | None
    """The controller's result; None: the controller was killed."""
    others: tuple[End, ...] = ()
    recovered: End | None = None


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of checking a trial."""

    wrong: list[str]
    gone: bool
    """Whether the guest was lost with its host or QEMU, as expected."""


def play(
    scene: Scene,
    injury: Injury,
    moment: Moment,
    *,
    delay: float = 0.0,
    inside: bool = False,
    cancel: bool = False,
) -> Told:
    """Run a migration with a fault, repair the fault, and wait until the controller exits.

    `delay`: seconds from the start of the phase to the fault. `inside`: strike during
    libvirt's cleanup instead of the controller's. `cancel`: the operator also cancels the
    migration. The caller prepares and clears the injury, as the journal may be on a disk that the
    injury created. Raises LabError if a controller does not exit in time.
    """
    hit = False
    try:
        began = scene.controller = scene.start(scene.target)
        injury.aim()
        if moment is Moment.CLEANUP and inside:
            hit = _arrives(scene) and injury.strike()
        else:
            reached = began.reach(moment, limit=_TO_THE_MOMENT)
            time.sleep(delay if reached else 0.0)
            hit = reached and began.is_at(moment) and injury.strike()
        if cancel and began.running:
            began.interrupt()
        end = _after(scene, injury, killed=not began.running and hit)
    finally:
        injury.repair()
        for one in scene.plan.hosts:
            network.shape(scene.plan, one.name, None)
        if scene.controller is not None:
            scene.controller.kill()
    return Told(hit=hit, end=end, others=tuple(scene.ends))


def _after(scene: Scene, injury: Injury, *, killed: bool) -> End | None:
    """Repair the fault when it is due, and wait until the controller exits.

    `killed`: whether the fault struck and the controller has exited. Returns the controller's
    result; None if the fault killed it.
    """
    assert scene.controller is not None
    for_good = injury.lasts == float("inf")
    if not for_good:
        time.sleep(injury.lasts)
        injury.repair()
    for one in scene.plan.hosts:
        network.shape(scene.plan, one.name, None)
    end = scene.controller.end(limit=PATIENCE)
    if for_good:
        injury.repair()
    return None if killed and end.code < 0 else end


def _arrives(scene: Scene) -> bool:
    """Wait until the guest is running on the target.

    Returns whether the source QEMU still exists; False also if the guest never runs on the target.
    """
    assert scene.controller is not None
    census, first = Census(scene.plan), dict[QemuCopy, int]()
    give_up = Deadline(_TO_THE_MOMENT)
    while scene.controller.running and not give_up.passed():
        copies = census.copies(scene.guest)
        for copy in copies:
            ran = census.ran(copy)
            if copy.host == scene.target and ran - first.setdefault(copy, ran) > _RUNS:
                return any(one.host == scene.source for one in copies)
        time.sleep(0.003)
    return False


def recovered(scene: Scene, told: Told) -> Told:
    """Run vmckpt recover with the trial's journal. Returns `told` with the result of recover."""
    more = {"VMCKPT_STATE": str(scene.state), **scene.more}
    end = command_runner.run(scene.plan, "recover", "--json", limit=PATIENCE, more=more)
    return replace(told, recovered=end)


def unsettled(scene: Scene) -> list[str]:
    """Return a violation for each job that is still active, or if vmckpt jobs fails."""
    more = {"VMCKPT_STATE": str(scene.state), **scene.more}
    jobs = command_runner.run(scene.plan, "jobs", "--json", more=more)
    if jobs.code != 0:
        return [f"vmckpt jobs: {jobs.err.strip()}"]
    return [f"{one.get('job')} is still active" for one in jobs.report.get("all", [])]


def homes(ends: Ends, scene: Scene) -> tuple[str, ...]:
    """Return the hosts on which the guest may be."""
    match ends:
        case Ends.STAYS:
            return (scene.source,)
        case Ends.MOVES:
            return (scene.target,)
        case Ends.LIVES | Ends.LIVES_OR_GONE:
            return (scene.source, scene.target, *((scene.other,) if scene.ends else ()))
        case Ends.GONE:
            return ()


def check_trial(scene: Scene, told: Told, ends: Ends, checker: Checker) -> TrialResult:
    """Check the result of a trial. A guest that was lost as expected is started again.

    `told`: the outcome of the trial's commands; `ends`: what may have become of the guest.
    """
    wrong = []
    if told.end is not None and told.end.code in _COMMAND_LINE:
        wrong.append(f"the command was rejected: {told.end.err.strip()}")
    lives = any(one.runs for one in checker.look(scene.guest))
    gone = ends is Ends.GONE or (ends is Ends.LIVES_OR_GONE and not lives)
    if told.recovered is not None and told.recovered.code != 0 and not gone:
        end = f"vmckpt recover exited with {told.recovered.code}"
        wrong.append(f"{end}: {told.recovered.err.strip()}")
    if gone:
        return TrialResult(wrong + rightly_gone(scene, told, checker), gone=True)
    wrong += checker.settled(scene.guest, homes(ends, scene))
    places = checker.places(scene.guest)
    if told.end is not None and not any(one.outcome == "completed" for one in told.others):
        way = {"source": scene.source, "target": scene.target}
        wrong += filter(None, [truthful(told.end.outcome, places, **way)])
    wrong += checker.ledgers(scene.guest) + checker.strays(scene.guest, scene.source)
    return TrialResult(wrong, gone=False)


def rightly_gone(scene: Scene, told: Told, checker: Checker) -> list[str]:
    """Check a guest that must be lost: no copy is running, and its intact disk can be booted."""
    seen = checker.look(scene.guest)
    wrong = [f"the guest should be lost, but is running on {one.host}" for one in seen if one.runs]
    wrong += _remains(seen, told)
    places = [one.host for one in seen if one.runs]
    if told.end is not None:
        way = {"source": scene.source, "target": scene.target}
        wrong += filter(None, [truthful(told.end.outcome, places, **way)])
    if not wrong:
        wrong += checker.image(scene.guest, scene.source)
        wrong += checker.revive(scene.guest, scene.source) or checker.ledgers(scene.guest)
    return wrong


def _remains(seen: Sequence[HostCopy], told: Told) -> list[str]:
    """Return a violation if a part of a lost guest remains and no command reported it as lost.

    After a broken post-copy, both parts of a guest are kept for the operator.
    """
    kept = [one.host for one in seen if one.processes]
    if kept and not _reports_loss(told):
        return [f"part of the guest is on {' and '.join(kept)}, but no command reported a loss"]
    return []


def _reports_loss(told: Told) -> bool:
    """Return whether the migration, or a job in the output of recover, has the outcome "lost"."""
    outcomes: list[str | None] = [] if told.end is None else [told.end.outcome]
    if told.recovered is not None:
        outcomes += [one.get("outcome") for one in told.recovered.report.get("all", [])]
    return Outcome.LOST in outcomes
