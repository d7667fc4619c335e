"""The private part of a manifest: read, or refused in one line."""

import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.snapshots import KEYS, private
from vmckpt.errors import StoreDamaged
from vmckpt.store.format import private_part


def test_every_flipped_bit_inside_is_read_or_refused_in_one_line() -> None:
    data = private_part.written(private(KEYS.sealing()), KEYS.salt)
    for bit in range(len(data) * 8):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        try:
            private_part.read(memoryview(bytes(wrong)))
        except (StoreDamaged, ValueError) as refused:
            assert "\n" not in str(refused)  # noqa: PT017
    for end in range(len(data)):
        with pytest.raises((StoreDamaged, ValueError)):
            private_part.read(memoryview(data[:end]))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(noise=st.binary(max_size=400), length=st.integers(0, 500))
def test_noise_inside_is_refused_in_one_line(noise: bytes, length: int) -> None:
    for data in (noise, length.to_bytes(4, "little") + noise):
        with pytest.raises((StoreDamaged, ValueError)) as refused:
            private_part.read(memoryview(data))
        assert "\n" not in str(refused.value)


def test_a_guest_that_claims_to_be_huge_takes_no_memory() -> None:
    text = (
        b'{"salt":null,"chunks":0,"regions":[{"name":"a","kind":"ram","size":%d,"unit":4096,'
        b'"map":0}],"files":[],"facts":{"domain_xml":"","cpu_xml":null,"boot_files":[],"ram":[],'
        b'"disks":[]}}'
    )
    tracemalloc.start()
    for size, what in ((1 << 62, "too large for one snapshot"), (1 << 40, "truncated")):
        told = text % size
        with pytest.raises((ValueError, StoreDamaged), match=what):
            private_part.read(memoryview(len(told).to_bytes(4, "little") + told))
    # numpy's untouched pages are counted, but are no memory: 2^28 units of 4 bytes.
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak <= (1 << 30) + (1 << 20)
