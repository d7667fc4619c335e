"""The devices in a stream's tail, and the processors' registers."""

import pytest

from tests.support.streams import NAMES, parsed, recorded
from vmckpt.capture.qemu_stream import devices


@pytest.mark.parametrize("name", NAMES)
def test_registers_come_out_of_the_device_state(name: str) -> None:
    (processor,) = devices.processors(parsed(recorded(name)).tail_bytes)

    assert processor.registers["rflags"] & 0x2
    assert processor.registers["cr0"] & 0x10
    assert processor.segments["cs"].limit in (0xFFFF, 0xFFFFFFFF)


@pytest.mark.parametrize("tail", [b"", b"\0", b"\0\x06\0\0\0\x02{}", b"\0\x06\0\0\0\x01x"])
def test_a_tail_without_description_has_no_devices(tail: bytes) -> None:
    assert (devices.sections(tail), devices.processors(tail)) == ([], [])


def test_a_tail_that_lies_about_its_devices_has_none() -> None:
    tail = parsed(recorded("plain-7.2")).tail_bytes

    assert devices.sections(tail[100:]) == []
