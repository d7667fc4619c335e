"""What a snapshot's public facts may be."""

from dataclasses import replace

import pytest

from tests.support.snapshots import OPEN, PUBLIC, private
from vmckpt.errors import StoreError
from vmckpt.store.format.manifest import (
    encode,
)
from vmckpt.store.format.metadata import Public


@pytest.mark.parametrize(
    "wrong",
    [
        replace(PUBLIC, guest="a\x07"), replace(PUBLIC, id="../x"),
        replace(PUBLIC, made_at=float("nan")), replace(PUBLIC, memory=-1),
        replace(PUBLIC, guest="x" * 256), replace(PUBLIC, guest_uuid="1"),
        replace(PUBLIC, tags={"a\n": ""}),
    ],
    ids=["bell", "path", "nan", "negative", "long", "uuid", "tag"],
)  # fmt: skip
def test_a_public_part_that_makes_no_sense_is_not_written(wrong: Public) -> None:
    with pytest.raises(StoreError, match=r"cannot be written: [a-z_]+"):
        encode(wrong, private(OPEN.sealing()), OPEN)
