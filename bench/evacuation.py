"""Plan and simulate evacuations: how long a plan takes, and how well it works.

    .venv/bin/python -m bench.evacuation [--only scale,race] [--fleets 20]
        [--json bench/results/evacuation.json]

`scale` plans and simulates the evacuation of a rack of 40 hosts, in a fleet of 1,000 hosts with
20,000 guests, and then of fleets with 100 to 10,000 guests. `race` compares vmckpt with two other
methods on the same simulated racks, in which the amount of data that a move sends deviates by up to
30 %, and some moves fail halfway. The other methods are:

* serial: the guests of each host one after the other, as OpenStack Nova does with the default
  max_concurrent_live_migrations of 1, each to the host with the most free memory
* jobsets, as in Ganeti's hbal: sets of concurrent moves without a common host; the next set starts
  when all moves of the previous set have ended
"""

import argparse
import json
import math
import random
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vmckpt.evacuation.bandwidth import Move, Under, advance, begin, gain, over
from vmckpt.evacuation.plan import forecast, placement
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet, Place, Rules, Tenant
from vmckpt.evacuation.schedule import Windows, links_of
from vmckpt.evacuation.state import EvacuationTerms, RetryLimits
from vmckpt.simulation.evacuation import Luck, Sim
from vmckpt.units import GIB, Bytes, BytesPerSecond

GBIT = 125_000_000
RULES = Rules(keep_free=0.05)
WINDOWS = Windows(per_source=2, per_target=2, total=1000)
TERMS = EvacuationTerms(rules=RULES, windows=WINDOWS, patience=RetryLimits(tries=10))


def rack(seed: int, hosts: int, guests: int, emptied: int) -> tuple[Fleet, list[Tenant]]:
    """Generate a fleet. Returns the fleet, and the guests of the first `emptied` hosts.

    Hosts have 256 to 512 GiB and links of 10 or 25 Gbit/s; guests have 1 to 32 GiB.
    """
    dice = random.Random(seed)
    places = [
        Place(
            name=f"h{number:04}", memory=Bytes(dice.choice((256, 384, 512)) * GIB), cpus=512.0,
            labels=MappingProxyType({"rack": f"r{number // 40}"}),
            closed="it is being evacuated" if number < emptied else None,
            link=BytesPerSecond(dice.choice((10, 25)) * GBIT),
        )
        for number in range(hosts)
    ]  # fmt: skip
    used = [0.0] * hosts
    tenants = []
    for number in range(guests):
        memory = dice.choice((1, 2, 4, 4, 8, 8, 16, 32)) * GIB
        at = min(dice.sample(range(hosts), min(4, hosts)), key=lambda one: used[one])
        if used[at] + memory > places[at].memory * 0.8:
            continue
        used[at] += memory
        tenants.append(
            Tenant(
                name=f"g{number:05}", host=places[at].name, memory=Bytes(memory), cpus=2.0,
                apart=frozenset({f"c{dice.randrange(200)}"}) if dice.random() < 0.02
                else frozenset(),
                dirty=BytesPerSecond(dice.choice((0, 10, 50, 200)) * 1_000_000),
            )
        )  # fmt: skip
    gone = {one.name for one in places[:emptied]}
    return Fleet(tuple(places), tuple(tenants)), [one for one in tenants if one.host in gone]


def scale(_: argparse.Namespace) -> dict[str, Any]:
    """Measure how long plans take."""
    large = _planned(1, 1000, 20_000, 40)
    print(f"{'hosts':>6} {'guests':>7} {'moves':>6} {'plan':>8} {'n log n':>9}")
    sizes = (100, 300, 1000, 3000, 10_000)
    rows = [large, *(_planned(2, one // 20, one, max(1, one // 500)) for one in sizes)]
    first = rows[1]["seconds"] / (rows[1]["guests"] * math.log(rows[1]["guests"]))
    for row in rows:
        row["over_n_log_n"] = row["seconds"] / (row["guests"] * math.log(row["guests"])) / first
        print(
            f"{row['hosts']:>6} {row['guests']:>7} {row['moves']:>6} {row['seconds']:>7.2f}s"
            f" {row['over_n_log_n']:>8.2f}x"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"at most {peak:.0f} MiB of memory")
    return {"rows": rows, "memory_mib": round(peak)}


def _planned(seed: int, hosts: int, guests: int, emptied: int) -> dict[str, Any]:
    fleet, leaving = rack(seed, hosts, guests, emptied)

    def once() -> tuple[float, int]:
        began = time.perf_counter()
        found = placement.place(fleet, leaving, RULES)
        moves = [
            Move(tenant=one.tenant, source=one.tenant.host, target=one.target)
            for one in found.going
        ]
        played = forecast.play(fleet, moves, RULES, WINDOWS)
        assert not played.stuck
        assert not found.left
        return time.perf_counter() - began, len(moves)

    tried = [once() for _ in range(3)]
    return {
        "hosts": hosts, "guests": len(fleet.tenants), "moves": tried[0][1],
        "seconds": round(statistics.median(took for took, _ in tried), 3),
    }  # fmt: skip


@dataclass
class Others:
    """A simulation of other methods, with the same model of links and the same random failures."""

    fleet: Fleet
    luck: Luck
    seed: int
    now: float = 0.0
    moved: int = 0
    tries: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.capacity = CapacityModel(self.fleet.places, self.fleet.tenants, RULES)
        self.links = links_of(self.fleet)
        self.running: list[tuple[Under, Move, bool]] = []

    def begin(self, move: Move) -> None:
        """Start a move. The data that it really sends, and whether it fails, are drawn now."""
        self.capacity.place(move.tenant, self.capacity.index[move.target])
        fate = self.luck.of(self.seed, move, self.tries[move.name])
        self.tries[move.name] += 1
        self.running.append((begin(fate.real(move)), move, fate.fails is not None))

    def step(self) -> tuple[list[Move], list[Move]]:
        """Simulate until a move ends. Returns the moves that arrived and the moves that failed."""
        took, after = advance([one for one, _, _ in self.running], self.links)
        self.now += took
        arrived: list[Move] = []
        failed: list[Move] = []
        still: list[tuple[Under, Move, bool]] = []
        for under, (_, move, fails) in zip(after, self.running, strict=True):
            if not over(under):
                still.append((under, move, fails))
                continue
            gone = move.target if fails else move.source
            self.capacity.remove(move.tenant, self.capacity.index[gone])
            (failed if fails else arrived).append(move)
        self.running = still
        self.moved += len(arrived)
        return arrived, failed

    def roomiest(self, tenant: Tenant) -> str | None:
        """Return the possible target with the most free memory; None without a possible target."""
        may = self.capacity.allowed_hosts(tenant)
        able = [at for at, yes in enumerate(may.tolist()) if yes]
        if not able:
            return None
        return self.fleet.places[
            max(able, key=lambda at: self.fleet.places[at].memory - self.capacity.used[at])
        ].name


def serial(fleet: Fleet, leaving: Sequence[Tenant], luck: Luck, seed: int) -> tuple[float, int]:
    """Simulate one move at a time from each host. Returns the duration and the number of moves.

    A guest whose move failed goes to the end of its host's queue.
    """
    world = Others(fleet, luck, seed)
    queues: dict[str, list[Tenant]] = {}
    for one in leaving:
        queues.setdefault(one.host, []).append(one)
    while True:
        busy = {move.source for _, move, _ in world.running}
        for host, queue in queues.items():
            if host in busy or not queue:
                continue
            target = world.roomiest(queue[0])
            if target is not None:
                tenant = queue.pop(0)
                world.begin(Move(tenant=tenant, source=tenant.host, target=target))
        if not world.running:
            return world.now, world.moved
        for move in world.step()[1]:
            queues[move.source].append(move.tenant)


def jobsets(fleet: Fleet, leaving: Sequence[Tenant], luck: Luck, seed: int) -> tuple[float, int]:
    """Simulate sets of concurrent moves without a common host, one set after the other.

    Returns the duration and the number of moves.
    """
    world = Others(fleet, luck, seed)
    waiting = list(leaving)
    while waiting:
        used: set[str] = set()
        for tenant in list(waiting):
            if tenant.host in used:
                continue
            may = world.capacity.allowed_hosts(tenant)
            for name in used:
                may[world.capacity.index[name]] = False
            if not may.any():
                continue
            costs = [
                (world.capacity.used[at] / fleet.places[at].memory, at)
                for at, yes in enumerate(may.tolist()) if yes
            ]  # fmt: skip
            target = fleet.places[min(costs)[1]].name
            used |= {tenant.host, target}
            waiting.remove(tenant)
            world.begin(Move(tenant=tenant, source=tenant.host, target=target))
        if not world.running:
            break
        while world.running:
            waiting += [move.tenant for move in world.step()[1]]
    return world.now, world.moved


def bound(fleet: Fleet, leaving: Sequence[Tenant], luck: Luck, seed: int) -> float:
    """Return a lower bound of the duration for any order of the moves, in seconds.

    All data that leaves a host uses the host's link, and all data together uses the links of the
    targets. The bound ignores pages that are sent again, failed attempts and setup.
    """
    links = links_of(fleet)
    sent: dict[str, float] = {}
    for one in leaving:
        good = replace(luck, fails=0.0)
        share = good.of(seed, Move(tenant=one, source=one.host, target=""), 0).share
        sent[one.host] = sent.get(one.host, 0) + one.travels * share
    targets = sum(links[one.name] for one in fleet.places if one.closed is None)
    return max(*(size / links[host] for host, size in sent.items()), sum(sent.values()) / targets)


def floor(fleet: Fleet, leaving: Sequence[Tenant], luck: Luck, seed: int) -> float:
    """Return a lower bound that includes the unavoidable part of retransmissions and failures.

    Pages that a guest writes during its move are sent again even if the guest has its host's link
    to itself, and a failed attempt has already sent data.
    """
    links = links_of(fleet)
    busy: dict[str, float] = {}
    for one in leaving:
        move = Move(tenant=one, source=one.host, target="")
        for tries in range(TERMS.patience.tries):
            fate = luck.of(seed, move, tries)
            under = begin(fate.real(move))
            took = under.left / gain(under, links[one.host])
            busy[one.host] = busy.get(one.host, 0.0) + took
            if fate.fails is None:
                break
    return max(busy.values())


def race(args: argparse.Namespace) -> dict[str, Any]:
    """Compare how long the methods take to evacuate a rack."""
    names = ("bound", "floor", "vmckpt", "serial", "jobsets")
    print(f"{'fleet':>5} {'moves':>6}" + "".join(f" {name:>8}" for name in names))
    rows = []
    for seed in range(args.fleets):
        fleet, leaving = rack(seed, 200, 3000, 40)
        luck = Luck(fails=0.02)
        least = bound(fleet, leaving, luck, seed)
        sim = Sim(fleet, frozenset(one.name for one in leaving), TERMS, luck=luck, seed=seed)
        sim.run()
        found = {
            "vmckpt": (sim.now, len(sim.moved)),
            "serial": serial(fleet, leaving, luck, seed),
            "jobsets": jobsets(fleet, leaving, luck, seed),
        }
        assert all(moved == len(leaving) for _, moved in found.values()), found
        ratios = {name: took / least for name, (took, _) in found.items()}
        helpless = floor(fleet, leaving, luck, seed) / least
        rows.append({"seed": seed, "moves": len(leaving), "bound_s": round(least, 1),
                     "floor": round(helpless, 3)}
                    | {name: round(ratio, 3) for name, ratio in ratios.items()})  # fmt: skip
        print(
            f"{seed:>5} {len(leaving):>6} {least:>7.0f}s {helpless:>7.2f}x"
            + "".join(f" {ratio:>7.2f}x" for ratio in ratios.values()),
            flush=True,
        )
    told: dict[str, Any] = {"rows": rows}
    for name in ("vmckpt", "serial", "jobsets"):
        of = [row[name] for row in rows]
        told[name] = {"median": statistics.median(of), "worst": max(of)}
        print(f"{name}: median {told[name]['median']:.3f} of the bound, worst {max(of):.3f}")
    above = [row["vmckpt"] / row["floor"] for row in rows]
    told["of_the_floor"] = {"median": statistics.median(above), "worst": max(above)}
    worst, median = max(above), statistics.median(above)
    print(f"vmckpt, of the bound with unavoidable costs: median {median:.3f}, worst {worst:.3f}")
    told["never_worse"] = all(row["vmckpt"] <= min(row["serial"], row["jobsets"]) for row in rows)
    print(f"vmckpt is never slower than the other methods: {told['never_worse']}")
    return told


def main() -> None:
    """Run the chosen measurements and save the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="scale,race")
    parser.add_argument("--fleets", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {name: {"scale": scale, "race": race}[name](args) for name in args.only.split(",")}
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
