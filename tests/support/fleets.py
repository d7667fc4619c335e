"""Fleets made up for tests: as many hosts and guests as wanted, from a seed."""

import random
from dataclasses import replace

from vmckpt.evacuation.plan.fleet import Fleet, Needs, Place, Rules, Tenant
from vmckpt.evacuation.state import (
    EvacuationTerms,
)
from vmckpt.units import Bytes, BytesPerSecond

GIB = 1 << 30


def host(name: str, memory: float = 64, **more: object) -> Place:
    """`memory` in GiB."""
    made = Place(
        name=name, memory=Bytes(int(memory * GIB)), cpus=64.0, offers=frozenset({"v1"}),
        machines=frozenset({"q35"}), networks=frozenset({"br0"}), storage=frozenset({"nfs"}),
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def guest(name: str, at: str, memory: float = 4, **more: object) -> Tenant:
    """`memory` in GiB."""
    made = Tenant(name=name, host=at, memory=Bytes(int(memory * GIB)), cpus=2.0)
    return replace(made, **more)  # type: ignore[arg-type]


def needs(**wanted: object) -> Needs:
    return replace(Needs(), **wanted)  # type: ignore[arg-type]


def fleet(places: list[Place], *tenants: Tenant) -> Fleet:
    return Fleet(tuple(places), tuple(tenants))


def random_fleet(
    seed: int, hosts: int, guests: int, *, full: float = 0.6, empty: int = 1
) -> tuple[Fleet, list[Tenant]]:
    """And who is to leave: all on the first `empty` hosts, where nothing may be placed any more."""
    dice = random.Random(seed)
    places = [
        host(
            f"h{number}", dice.choice((64, 128, 256)),
            closed="it is emptied" if number < empty else None,
            networks=frozenset({"br0"} | ({"br1"} if dice.random() < 0.5 else set())),
            offers=frozenset({"v1"} | ({"v2"} if dice.random() < 0.7 else set())),
            link=BytesPerSecond(dice.choice((125_000_000, 1_250_000_000))),
        )
        for number in range(hosts)
    ]  # fmt: skip
    room = {one.name: one.memory * full for one in places}
    tenants = []
    for number in range(guests):
        memory = dice.choice((1, 2, 4, 8, 16))
        able = [one for one in places if room[one.name] >= memory * GIB]
        if not able:
            break
        at = dice.choice(able)
        room[at.name] -= memory * GIB
        wants = needs(
            cpu="v2" if "v2" in at.offers and dice.random() < 0.3 else "v1",
            networks=frozenset(
                {"br1"} if "br1" in at.networks and dice.random() < 0.3 else {"br0"}
            ),
        )
        apart = frozenset({f"g{dice.randrange(5)}"}) if dice.random() < 0.1 else frozenset()
        tenants.append(
            guest(f"vm{number}", at.name, memory, needs=wants, apart=apart,
                  dirty=BytesPerSecond(dice.choice((0, 1 << 20, 50 << 20))))
        )  # fmt: skip
    made = Fleet(tuple(places), tuple(tenants))
    gone = {one.name for one in places[:empty]}
    return made, [one for one in tenants if one.host in gone]


TERMS = EvacuationTerms(rules=Rules(keep_free=0.0))
OFF = host("a", closed="it is emptied")
