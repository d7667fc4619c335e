"""Snapshots bit by bit: what is wrong, and who needs it."""

from dataclasses import replace

import numpy as np

from tests.support.snapshots import bare, ram
from vmckpt.snapshot.verify.verify import misfits
from vmckpt.store.format.metadata import Part


def test_maps_that_do_not_fit_their_chunks_are_found() -> None:
    kept = bare([ram([0, 1, -1, 64])], [b"a" * 32, b"b" * 32])
    lengths = np.array([8192, 4096], dtype=np.uint32)
    assert list(misfits(kept, lengths)) == []
    assert list(misfits(kept, lengths // 2)) == [
        "2 units of pc.ram are not in the chunks that its map names"
    ]
    assert list(misfits(kept, np.array([8192, 5000], dtype=np.uint32))) == [
        "1 units of pc.ram are not in the chunks that its map names"
    ]
    assert list(misfits(kept, np.array([8192, 0], dtype=np.uint32))) == []
    part = replace(kept.facts, stream=(Part(name="tail", size=4095, chunks=(1,)),))
    assert list(misfits(replace(kept, facts=part), lengths)) == [
        "part tail of its stream is not as long as its chunks"
    ]
