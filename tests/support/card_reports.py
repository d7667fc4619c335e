"""Reports of network cards that `vmckpt prepare --live` replaces."""

from dataclasses import replace
from typing import Any

from vmckpt.capture.network_cards import CardReport
from vmckpt.snapshot.live_cards import LiveCards
from vmckpt.snapshot.prepare import Readiness
from vmckpt.units import Seconds

CARD = CardReport(
    card="net0", mac="52:54:00:00:00:01", why="net0 uses vhost", agent=True,
    addresses=("10.0.0.5",),
)  # fmt: skip
DONE = replace(CARD, replaced=True, gone=Seconds(0.75))
LOST = replace(DONE, gone=Seconds(60.0), missing=("10.0.0.5",))


def found(*known: CardReport, **more: Any) -> Readiness:
    return Readiness(
        guest="web1", host="alpha", findings=(), lacks=False, restart=False,
        live=LiveCards(cards=known, **more),
    )  # fmt: skip
