"""Plan evacuations of generated fleets, next to hbal, and simulate them next to two other methods.

    bench/all --only plans

The plans of a rack's evacuation are measured for fleets of up to 10,000 hosts with 200,000 guests.
hbal, of Ganeti, plans the same evacuations (`--evac-mode`), unless it needs longer than its time
limit. Then vmckpt's evacuations are simulated, in which the amount of data that a move sends
deviates by up to 30 %, and some moves fail halfway. The same racks are evacuated by:

* serial: the guests of each host one after the other, as OpenStack Nova does with the default
  max_concurrent_live_migrations of 1, each to the host with the most free memory
* jobsets, as in Ganeti's hbal: sets of concurrent moves without a common host; the next set starts
  when all moves of the previous set have ended
"""

import os
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.figure import Figure, Result, best
from bench.peers import PEERS, told
from vmckpt.evacuation.bandwidth import Move, Under, advance, begin, gain, over
from vmckpt.evacuation.plan import forecast, placement
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet, Place, Rules, Tenant
from vmckpt.evacuation.schedule import Windows, links_of
from vmckpt.evacuation.state import EvacuationTerms, RetryLimits
from vmckpt.simulation.evacuation import Luck, Sim
from vmckpt.units import GIB, MIB, Bytes, BytesPerSecond

GBIT = 125_000_000
RULES = Rules(keep_free=0.05)
WINDOWS = Windows(per_source=2, per_target=2, total=1000)
SIZES = ((50, 1000, 2), (500, 10_000, 20), (1000, 20_000, 40), (10_000, 200_000, 400))
"""Hosts, guests, and hosts to evacuate."""
HBAL = (str(PEERS / "usr/lib/ganeti/3.0/usr/bin/hbal"),)
_HBAL_LIMIT, _LONG = 30.0, 10.0
_LIBRARIES = {**os.environ, "LD_LIBRARY_PATH": str(PEERS / "lib/x86_64-linux-gnu")}
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


def planned(hosts: int, guests: int, emptied: int) -> dict[str, Any]:
    """Measure a plan for a fleet: vmckpt's, hbal's, and sorting the guests in Python."""
    fleet, leaving = rack(2, hosts, guests, emptied)

    def plan() -> int:
        found = placement.place(fleet, leaving, RULES)
        moves = [
            Move(tenant=one.tenant, source=one.tenant.host, target=one.target)
            for one in found.going
        ]
        played = forecast.play(fleet, moves, RULES, WINDOWS)
        assert not played.stuck
        assert not found.left
        return len(moves)

    took, moves = timed(plan)
    sort, _ = timed(lambda: len(sorted(fleet.tenants, key=lambda one: -one.memory)))
    return {
        "hosts": hosts, "guests": len(fleet.tenants), "moves": moves, "seconds": took,
        "sort_s": sort, "hbal_s": hbal(fleet),
    }  # fmt: skip


def timed(work: Callable[[], int]) -> tuple[float, int]:
    """Return the median of three durations, in seconds, and the result; of one, if it is long."""
    took: list[float] = []
    result = 0
    while len(took) < 3 and sum(took) < _LONG:
        began = time.perf_counter()
        result = work()
        took.append(time.perf_counter() - began)
    return statistics.median(took), result


def hbal(fleet: Fleet) -> float | None:
    """Return how long hbal takes to plan the same evacuation; None: longer than its time limit."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "fleet")
        data.write_text(hbal_text(fleet))
        words = ["--evac-mode", "--restricted-migration", "-t", str(data), f"-C{folder}/commands"]
        began = time.perf_counter()
        try:
            subprocess.run([*HBAL, *words], env=_LIBRARIES, check=True, capture_output=True,
                           timeout=_HBAL_LIMIT)  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
        return time.perf_counter() - began


def hbal_text(fleet: Fleet) -> str:
    """Return a fleet in the format of Ganeti's htools; guests are on shared storage. Pure."""
    used: Counter[str] = Counter()
    for one in fleet.tenants:
        used[one.host] += one.memory
    policy = "128,1,1,1,1,1|128,1,1,1,1,1;1048576,512,1048576,16,8,12|ext|4.0|32.0"
    nodes = [
        f"{one.name}|{one.memory // MIB}|0|{(one.memory - used[one.name]) // MIB}|9999999|9999999|"
        f"{one.cpus:.0f}|{'Y' if one.closed else 'N'}|group|1||N|0|1|1.0"
        for one in fleet.places
    ]
    # The last node is Ganeti's master.
    nodes[-1] = nodes[-1].replace("|N|group|", "|M|group|")
    instances = [
        f"{one.name}|{one.memory // MIB}|1|{one.cpus:.0f}|running|Y|{one.host}||ext||1|1|N"
        for one in fleet.tenants
    ]
    lines = ["default|group|preferred||", "", *nodes, "", *instances, "", ""]
    return "\n".join([*lines, f"|{policy}", f"default|{policy}", ""])


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


def race(fleets: int) -> dict[str, Any]:
    """Compare how long the methods take to evacuate a rack, relative to the lower bound."""
    rows = []
    for seed in range(fleets):
        fleet, leaving = rack(seed, 200, 3000, 40)
        luck = Luck(fails=0.02)
        sim = Sim(fleet, frozenset(one.name for one in leaving), TERMS, luck=luck, seed=seed)
        sim.run()
        found = {
            "vmckpt": (sim.now, len(sim.moved)),
            "serial": serial(fleet, leaving, luck, seed),
            "jobsets": jobsets(fleet, leaving, luck, seed),
        }
        assert all(moved == len(leaving) for _, moved in found.values()), found
        row = {name: round(took, 1) for name, (took, _) in found.items()}
        rows.append({"seed": seed, "moves": len(leaving), **row,
                     "bound": round(bound(fleet, leaving, luck, seed), 1),
                     "floor": round(floor(fleet, leaving, luck, seed), 1)})  # fmt: skip
        print(rows[-1], flush=True)
    keys = ("vmckpt", "serial", "jobsets", "bound", "floor")
    return {"rows": rows, "medians": {k: statistics.median(row[k] for row in rows) for k in keys}}


def measure(*, quick: bool) -> Result:
    """Plan all fleets, and simulate evacuations; `quick`: small fleets."""
    rows = []
    for hosts, guests, emptied in SIZES[:1] if quick else SIZES:
        rows.append(planned(hosts, guests, emptied))
        print(rows[-1], flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    raced = race(1 if quick else 10)
    return Result(
        figures=figures(rows, peak, raced["medians"]),
        versions={"hbal": told([*HBAL, "--version"], _LIBRARIES).split()[3]},
        raw={"plans": rows, "peak_mib": peak, "race": raced},
    )


def figures(
    rows: Sequence[dict[str, Any]], peak: float, race: dict[str, float]
) -> tuple[Figure, ...]:
    """Return the figures of the plans and the simulations. Pure."""
    made = [
        Figure(
            what=f"{row['hosts']:,} hosts, {row['guests']:,} guests: plan of {row['moves']} moves",
            unit="s", ours=row["seconds"], limit=row["sort_s"], limit_is="sorting the guests",
            peer=row["hbal_s"], peer_is="hbal",
        )
        for row in rows
    ]  # fmt: skip
    other, other_is = best({name: race[name] for name in ("serial", "jobsets")})
    return (
        *made,
        Figure(what="peak memory of all plans", unit="MiB", ours=peak),
        Figure(what="simulated evacuation of a rack", unit="s", ours=race["vmckpt"],
               limit=race["floor"], limit_is="links", peer=other, peer_is=f"{other_is}, simulated"),
    )  # fmt: skip
