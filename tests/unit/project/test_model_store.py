"""The model's lease store answers as the real one does on PostgreSQL."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from bench.model import store
from bench.model.world import Lease
from tests.support import postgres
from tests.support.lease_protection import Protection
from vmckpt.lease import client as lease_client

_ROUNDS, _STEPS = 12, 25


@pytest.fixture
def protection(postgresql: postgres.Server) -> Iterator[Protection]:
    made = Protection(postgresql)
    yield made
    for client in made.clients:
        client.close()
    lease_client.revoke(postgresql.url(), made.guest, force=True)


def _question(chance: random.Random, token: int) -> tuple[str, tuple[Any, ...]]:
    """One that an agent may ask; its token is often an old or a wrong one."""
    holder, other = chance.sample(("alpha", "beta"), 2)
    shown = max(1, token + chance.choice((0, 0, 0, -1, 1)))
    claim = f"claim {chance.randrange(3)}"
    return chance.choice((
        ("acquire", (holder, claim)), ("renew_on", (shown, holder, "1")),
        ("validate", (shown, holder)),
        ("invalidate", (shown, holder, claim)), ("hand_over", (shown, holder, other, claim)),
        ("release", (shown, holder)), ("acquire_again", (holder, claim, shown)),
        ("take_over", (shown, holder, claim, "0", 0.0)), ("look", ()),
    ))  # fmt: skip


@pytest.mark.parametrize("seed", range(_ROUNDS))
def test_both_answer_alike(protection: Protection, seed: int) -> None:
    chance, model, asked = random.Random(seed), Lease(), []
    client = protection.client("alpha")
    protection.set("holder = NULL, state = 'free', token = 1, claim = NULL")
    for _ in range(_STEPS):
        call, args = _question(chance, model.token)
        model, told = store.ask(model, call, args)
        slots = ", ".join(["%s"] * len(args))
        cast = slots if call != "take_over" else "%s, %s, %s, %s, %s::float8"
        real = client._ask(f"{call}({cast})", *args)
        asked.append((call, args))

        assert real["said"] == told["said"], asked
        assert real.get("token") == told.get("token"), asked
        assert bool(real.get("forgot")) == bool(told.get("forgot")), asked
        row = client._ask("look()")
        assert (row["state"], row["token"], row["holder"] or "") == model[:3], asked
