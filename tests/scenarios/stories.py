"""The stories. Numbers are those of docs/policies.md where that tells the same story."""

from collections.abc import Callable

from tests.scenarios.story import Story
from tests.support.simulated import GIB, Machine, Writer, steady
from vmckpt.model.migration import Mode
from vmckpt.units import MIB

LINK = 1.1 * GIB
GBIT = 119.0 * MIB


def writing(
    rate: float, region: float, *, memory: float = 8 * GIB, link: float = LINK
) -> Callable[[], Machine]:
    """A guest that rewrites one region for ever."""
    return lambda: Machine(
        memory=int(memory), link=steady(link), writers=[Writer(region=region, rate=rate)]
    )


def until(end: float, rate: float, region: float) -> Writer:
    """A writer that stops."""
    return Writer(region=region, rate=rate, active=lambda at: at < end)


def link(*pieces: tuple[float, float]) -> Callable[[float], float]:
    """A link that carries that much from that second on."""

    def rate(at: float) -> float:
        return next(carried for began, carried in reversed(pieces) if at >= began)

    return rate


def tides() -> Machine:
    """Writes much and little in turns, never little enough."""
    ebb = Writer(region=90 * MIB, rate=200 * MIB)
    flood = Writer(region=500 * MIB, rate=110 * MIB, active=lambda at: at % 14 < 8)
    return Machine(memory=2 * GIB, link=steady(GBIT), writers=[ebb, flood])


STORIES = (
    Story(
        name="balanced-rescue",
        about="Each pass leaves 80 % of the one before: post-copy sends the rest once.",
        policy="balanced",
        machine=writing(900 * MIB, 2 * GIB),
        within=15,
    ),
    Story(
        name="balanced-measured",
        about="The same, its dirtying known from a second's probe.",
        policy="balanced",
        machine=writing(900 * MIB, 2 * GIB),
        curve=((1.0, 900.0 * MIB),),
        within=15,
    ),
    Story(
        name="balanced-quiet",
        about="Writes a tenth of what the link carries: pre-copy ends by itself.",
        policy="balanced",
        machine=writing(110 * MIB, 2 * GIB),
        curve=((1.0, 110.0 * MIB),),
        never=("post-copy", "abort", "slow"),
        within=10,
    ),
    Story(
        name="balanced-graphics-card",
        about="A device of the host: no post-copy; slowed down after 20 s without progress.",
        policy="balanced",
        machine=writing(1.6 * GIB, 2 * GIB),
        mode=Mode.PRECOPY,
        post_copy=False,
        never=("post-copy", "abort"),
        within=120,
    ),
    Story(
        name="low-downtime-had-better-wait",
        about="Writes twice what the link carries: slowed down in vain, then given up.",
        policy="low-downtime",
        machine=writing(2 * GIB, 3 * GIB),
        mode=Mode.PRECOPY,
        post_copy=False,
        never=("post-copy", "pause"),
    ),
    Story(
        name="low-downtime-calms-down",
        about="Calm after a minute, just before it would be given up.",
        policy="low-downtime",
        machine=lambda: Machine(
            memory=8 * GIB, link=steady(LINK), writers=[until(60, 2 * GIB, 3 * GIB)]
        ),
        mode=Mode.PRECOPY,
        post_copy=False,
        never=("abort", "post-copy"),
        within=70,
    ),
    Story(
        name="must-finish-hot",
        about="Rewrites more than half of its memory: what pre-copy sends first is sent in vain.",
        policy="must-finish",
        machine=writing(100 * MIB, 150 * MIB, memory=256 * MIB, link=23.8 * MIB),
        curve=((0.3, 30.0 * MIB), (1.0, 100.0 * MIB), (1.5, 150.0 * MIB), (3.0, 150.0 * MIB)),
        never=("abort", "slow", "pause"),
        within=12,
    ),
    Story(
        name="must-finish-quiet",
        about="Its writes are known, and the rest fits into a pause: pre-copy ends by itself.",
        policy="must-finish",
        machine=writing(1 * MIB, 16 * MIB, memory=256 * MIB, link=23.8 * MIB),
        curve=((0.3, 0.3 * MIB), (1.0, 1.0 * MIB)),
        never=("post-copy", "abort", "slow", "pause"),
        within=13,
    ),
    Story(
        name="must-finish-graphics-card",
        about="No post-copy: a pause of 1.8 s is enough, allowed step by step.",
        policy="must-finish",
        machine=writing(1.6 * GIB, 2 * GIB),
        mode=Mode.PRECOPY,
        post_copy=False,
        never=("abort", "post-copy", "slow", "pause"),
        within=35,
    ),
    Story(
        name="must-finish-at-last",
        about="No post-copy, and not even 5 s are enough: slowed down, in the end paused.",
        policy="must-finish",
        machine=writing(300 * GBIT, 16 * GIB, memory=20 * GIB, link=8 * GBIT),
        mode=Mode.PRECOPY,
        post_copy=False,
        interval=1.0,
        never=("abort", "post-copy"),
        within=300,
    ),
    Story(
        name="never-postcopy-little-by-little",
        about="Its region needs 450 ms: allowed little by little from the third pass on.",
        policy="never-postcopy",
        machine=writing(1.5 * GIB, 500 * MIB),
        mode=Mode.PRECOPY,
        post_copy=False,
        never=("abort", "post-copy"),
        within=30,
    ),
    Story(
        name="never-postcopy-calms-down",
        about="Busy for a minute, then calm: it is slowed down meanwhile and arrives.",
        policy="never-postcopy",
        machine=lambda: Machine(
            memory=4 * GIB, link=steady(GBIT), writers=[until(60, 300 * MIB, 1 * GIB)]
        ),
        mode=Mode.PRECOPY,
        post_copy=False,
        interval=1.0,
        never=("abort", "post-copy"),
        within=120,
    ),
    Story(
        name="huge-memory",
        about="256 GiB over 25 Gbit/s: passes of a minute and more, a longer pause is enough.",
        policy="huge-memory",
        machine=writing(1.2 * GIB, 80 * GIB, memory=256 * GIB, link=2.9 * GIB),
        mode=Mode.PRECOPY,
        post_copy=False,
        interval=2.0,
        never=("abort", "post-copy"),
        within=300,
    ),
    Story(
        name="wan-little-left",
        about="400 Mbit/s; a guest that writes a little faster than that over 300 MiB.",
        policy="wan",
        machine=writing(60 * MIB, 300 * MIB, memory=2 * GIB, link=94 * MIB),
        interval=2.0,
        within=180,
    ),
    Story(
        name="wan-without-post-copy",
        about="The same where post-copy cannot be used: longer pauses, then a slower guest.",
        policy="wan",
        machine=writing(60 * MIB, 300 * MIB, memory=2 * GIB, link=94 * MIB),
        mode=Mode.PRECOPY,
        post_copy=False,
        interval=2.0,
        never=("post-copy",),
        within=600,
    ),
    Story(
        name="maintenance",
        about="Many are waiting: post-copy as soon as it costs less than waiting.",
        policy="maintenance",
        machine=writing(400 * MIB, 2 * GIB),
        within=12,
    ),
    Story(
        name="maintenance-near-the-limit",
        about="No post-copy; paused at 80 % of the time, and then not given up at the limit.",
        policy="maintenance",
        machine=writing(30 * MIB, 200 * MIB, memory=1 * GIB, link=3 * MIB),
        mode=Mode.PRECOPY,
        post_copy=False,
        interval=10.0,
        never=("abort", "post-copy"),
        within=700,
    ),
    Story(
        name="counter-not-reset",
        about="QEMU's counter goes on from a cancelled job: pass 4 is the first.",
        policy="balanced",
        machine=lambda: Machine(
            memory=8 * GIB, link=steady(LINK), writers=[Writer(region=2 * GIB, rate=900 * MIB)],
            earlier_passes=3, setup=0.6,
        ),
        within=15,
    ),
    Story(
        name="dead-network",
        about="The link dies in the second pass, as a switch falls due, and stays dead.",
        policy="shop.yaml",
        machine=lambda: Machine(
            memory=2 * GIB, link=link((0, GBIT), (30.0, 0.0)),
            writers=[Writer(region=512 * MIB, rate=200 * MIB)],
        ),
        interval=1.0,
        gives_up_after=100,
        never=("post-copy", "pause", "abort"),
    ),
    Story(
        name="dead-network-comes-back",
        about="The same, dead for 30 s: the switch waits until bytes move again.",
        policy="shop.yaml",
        machine=lambda: Machine(
            memory=2 * GIB, link=link((0, GBIT), (30.0, 0.0), (60.0, GBIT)),
            writers=[Writer(region=512 * MIB, rate=200 * MIB)],
        ),
        never=("abort",),
        within=80,
    ),
    Story(
        name="a-tenth-of-the-bandwidth",
        about="Converged nicely until the link lost nine tenths: post-copy, not endless passes.",
        policy="balanced",
        machine=lambda: Machine(
            memory=4 * GIB, link=link((0, LINK), (2.0, LINK / 10)),
            writers=[Writer(region=1 * GIB, rate=150 * MIB)],
        ),
        never=("abort",),
        within=60,
    ),
    Story(
        name="local-minimum",
        about="Busy and less busy in turns: the switch waits for a pass with less to send.",
        policy="shop.yaml",
        machine=tides,
        never=("abort",),
        within=90,
    ),
    Story(
        name="processed-exceeds-total",
        about="Sends its memory many times over: what is shown as done stays below 100 %.",
        policy="never-postcopy",
        machine=writing(150 * MIB, 256 * MIB, memory=512 * MIB, link=GBIT),
        interval=1.0,
        mode=Mode.PRECOPY,
        post_copy=False,
        never=("post-copy", "abort"),
        within=150,
    ),
)  # fmt: skip
