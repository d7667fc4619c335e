"""A descriptor that another process is given."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.hypervisor.qemu_process import descriptor_passing, injection


@pytest.fixture
def process() -> Iterator[WrittenProcess]:
    with WrittenProcess() as made:
        yield made


def links(process: WrittenProcess) -> dict[int, str]:
    found = Path(f"/proc/{process.held.pid}/fd").iterdir()
    return {int(one.name): str(one.readlink()) for one in found}


def test_the_process_receives_it_and_keeps_nothing_else(process: WrittenProcess) -> None:
    before = links(process)
    file = os.open("/dev/full", os.O_RDWR)
    try:
        with descriptor_passing.offered(process.held, file) as handover:
            number = injection.run(process.held, handover.receive)
    finally:
        os.close(file)
    assert links(process) == before | {number: "/dev/full"}
    flags = Path(f"/proc/{process.held.pid}/fdinfo/{number}").read_text()
    assert int(flags.split("flags:")[1].split()[0], 8) & os.O_CLOEXEC
    process.write([1])  # it runs on


def test_other_processes_that_connect_get_nothing(process: WrittenProcess) -> None:
    file = os.open("/dev/full", os.O_RDWR)
    before = links(process)
    offered = descriptor_passing.offered(process.held, file)
    with offered as handover, socket.socket(socket.AF_UNIX) as other:
        other.connect(handover._name)
        number = injection.run(process.held, handover.receive)
        assert other.recv(1) == b"", "nothing was sent"
    os.close(file)
    assert links(process) == before | {number: "/dev/full"}
