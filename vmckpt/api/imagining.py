"""The facade's part for plans on paper: hosts that a file describes."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vmckpt.errors import BadInput
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan import planner
from vmckpt.evacuation.plan.inventory import Seen
from vmckpt.evacuation.plan.plan import Plan
from vmckpt.evacuation.task import Task, terms
from vmckpt.migration.forecast.forecast import Range
from vmckpt.policy import loader
from vmckpt.simulation import fleet_file
from vmckpt.simulation.evacuation import Luck, Sim
from vmckpt.util.config_file import likely

LUCK = Luck(off=0.3, fails=0.02)
_PLAYS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Imagined:
    """A plan for a fleet of a file, and how it went when it was played."""

    plan: Plan
    plays: int
    total: Range
    """Seconds, of the plays."""
    arrived: int
    """Guests that did in every play."""

    def as_json(self) -> dict[str, Any]:
        """As a plan, and `played`; times in milliseconds."""
        told = {
            "plays": self.plays, "arrived": self.arrived,
            "total_ms": [round(self.total.low * 1000, 1), round(self.total.high * 1000, 1)],
        }  # fmt: skip
        return self.plan.as_json() | {"played": told}


def emptied(path: Path, task: Task, folder: Path | None) -> Imagined:
    """How a host of a fleet that a file describes would be emptied, and how that would go where
    durations are off and some moves fail. Raises BadInput, PolicyError."""
    run = loader.load_one(task.policy or planner.DEFAULT, loader.folder(folder, None)).evacuation
    limits = terms(run, task.kind)
    found = fleet_file.load(path, run.cpu_overcommit)
    names = {one.name for one in found.places}
    for host in (task.host, *(task.to or ())):
        if host not in names:
            raise BadInput(f"{path}: no host {host!r}{likely(host, names)}")
    seen = Seen(fleet=found, known=MappingProxyType({}), silent=MappingProxyType({}))
    there, asked = task.fleet(seen), task.asked(seen)
    plan = plans.made(task, seen, plans.placed(there, asked, limits), plans.NO_CHECKS, limits)
    able = frozenset(one.tenant.name for one in plan.going)
    plays = [Sim(there, able, limits, luck=LUCK, seed=seed) for seed in range(_PLAYS)]
    for one in plays:
        one.run()
    arrived = [len(able & {move.name for move in one.moved}) for one in plays]
    return Imagined(
        plan=plan, plays=len(plays), arrived=min(arrived),
        total=Range(min(one.now for one in plays), max(one.now for one in plays)),
    )  # fmt: skip
