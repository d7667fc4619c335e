"""A checkpoint of a guest, and how it went back to it."""

from vmckpt.snapshot.request import Restored, Taken
from vmckpt.units import Bytes, Seconds

NOTHING = Bytes(0)
TAKEN = Taken(
    id="s-aaaaaaaaaaaaaaaa", name="x", guest="web1", host="alpha", store="near",
    pause=Seconds(0.0), way="background", why="", phases={}, took=Seconds(1.0), read=NOTHING,
    same=NOTHING, zero=NOTHING, written=NOTHING, encrypted=False, warnings=(), job=None,
)  # fmt: skip
RESTORED = Restored(
    snapshot=TAKEN.id, guest="web1", host="alpha", disks=Seconds(0.0), memory=Seconds(0.0),
    took=Seconds(1.0), images={}, warnings=(), job=None,
)  # fmt: skip
