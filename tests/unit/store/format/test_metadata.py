"""What a snapshot's public facts may be."""

from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.support.snapshots import OPEN, PUBLIC, private
from vmckpt.errors import StoreError
from vmckpt.store.format.manifest import (
    encode,
)
from vmckpt.store.format.metadata import Part, Public, SnapshotId, dumped, loaded, new_id


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
    with pytest.raises(StoreError, match=r"cannot write snapshot \S+: [a-z_]+"):
        encode(wrong, private(OPEN.sealing()), OPEN)


def test_ids_are_told_apart_and_have_one_form() -> None:
    one, other = new_id(bytes(10)), new_id(bytes(9) + b"\x01", "g")

    assert one == "s-" + "a" * 16
    assert other.startswith("g-")
    assert TypeAdapter(SnapshotId).validate_python(one) == one
    with pytest.raises(ValidationError):
        TypeAdapter(SnapshotId).validate_python(other)


def test_a_form_is_read_as_it_was_written_and_nothing_else_in_one_line() -> None:
    form = TypeAdapter(Part)
    part = Part(name="tail", size=7, chunks=(1, 2))

    assert loaded(form, dumped(form, part)) == part
    for text in (
        b"",
        b"{}",
        b'{"name":"a","size":-1,"chunks":[]}',
        b'{"name":1,"size":1,"chunks":[]}',
        b'{"name":"a","size":"1","chunks":[]}',
        b'{"name":"a","size":1,"chunks":[],"more":1}',
    ):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            loaded(form, text)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        dumped(form, replace(part, name="\ud800"))
