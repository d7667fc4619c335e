"""The records of a write log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.replication.disks import write_log
from vmckpt.replication.disks.write_log import DATA, HEADER, TRIM, ZEROS, Record

Write = tuple[int, int, bytes | int]
"""Offset, kind, and the content or for how many bytes it is."""

OFFSETS = st.integers(0, (1 << 63) - 1)
WRITES = st.one_of(
    st.tuples(OFFSETS, st.just(DATA), st.binary(min_size=1, max_size=50)),
    st.tuples(OFFSETS, st.sampled_from([ZEROS, TRIM]), st.integers(1, write_log.FURTHEST)),
)


def log_of(writes: list[Write]) -> tuple[bytes, list[int]]:
    """The log, and where each record ends."""
    log, ends = b"", []
    for offset, kind, what in writes:
        if isinstance(what, bytes):
            log += write_log.header(offset, len(what)) + what
        else:
            log += write_log.header(offset, what, kind)
        ends.append(len(log))
    return log, ends


def seen(record: Record) -> Write:
    return record.offset, record.kind, record.length if record.data is None else bytes(record.data)


@given(st.lists(WRITES, max_size=8))
def test_what_was_written_is_read_in_the_same_order(writes: list[Write]) -> None:
    log, _ = log_of(writes)

    assert [seen(record) for record in write_log.records(log)] == writes
    assert write_log.whole(log) == len(log)


@given(st.lists(WRITES, min_size=1, max_size=5), st.data())
def test_a_log_that_is_cut_off_gives_its_whole_records_and_says_so(
    writes: list[Write], data: st.DataObject
) -> None:
    log, ends = log_of(writes)
    cut = data.draw(st.integers(0, len(log) - 1))
    boundary = max(end for end in [0, *ends] if end <= cut)

    assert write_log.whole(log[:cut]) == boundary
    assert len(list(write_log.records(log[:boundary]))) == [0, *ends].index(boundary)
    if cut != boundary:
        with pytest.raises(ValueError, match="truncated"):
            list(write_log.records(log[:cut]))


@given(st.binary(max_size=200))
def test_what_is_no_log_is_refused_or_is_one(data: bytes) -> None:
    try:
        found = list(write_log.records(data))
    except ValueError:
        return

    assert log_of([seen(record) for record in found])[0] == data


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(HEADER.pack(0, 512, 3, bytes(3)), id="an unknown kind"),
        pytest.param(HEADER.pack(0, 0, ZEROS, bytes(3)), id="nothing"),
        pytest.param(HEADER.pack(0, write_log.LONGEST + 1, DATA, bytes(3)), id="too long"),
        pytest.param(HEADER.pack(1 << 63, 512, ZEROS, bytes(3)), id="beyond every disk"),
        pytest.param(HEADER.pack(0, 512, ZEROS, b"\0\0\1"), id="something in the padding"),
        pytest.param(bytes(HEADER.size), id="a hole in the log"),
    ],
)
def test_a_header_without_sense_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError, match=r"invalid record"):
        write_log.whole(head + bytes(2 << 20))


def test_no_record_is_made_that_would_not_be_read() -> None:
    for offset, length, kind in [
        (0, 0, DATA), (0, write_log.LONGEST + 1, DATA), (-1, 1, DATA), (1 << 63, 1, TRIM),
        (0, write_log.FURTHEST + 1, ZEROS), (0, 1, 3),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="invalid record: "):
            write_log.header(offset, length, kind)
