import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from ctypes import addressof, c_char
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.remote import measure
from vmckpt.remote.scripts import measure_host
from vmckpt.units import MIB

PAGE = measure_host.PAGE


def test_the_sampler_sees_what_is_used_and_what_changes() -> None:
    with mmap.mmap(-1, 400 * PAGE) as memory:
        begin = addressof(c_char.from_buffer(memory))
        for page in range(100):
            memory[page * PAGE] = 1
        sampler = measure_host.Sampler(os.getpid(), [begin + i * PAGE for i in range(400)])

        memory[0 : 10 * PAGE : PAGE] = bytes(range(2, 12))
        memory[200 * PAGE] = 1
        memory[300 * PAGE] = 0  # touched, but the same
        when, changed, flips = sampler.again()

        assert sum(one != 0 for one in sampler.first) == 100
        assert (changed, flips) == (11, 3)
        assert 0 <= when < 1
        assert 102 <= sampler.resident() <= 400


def test_a_page_that_changed_back_was_written_all_the_same() -> None:
    with mmap.mmap(-1, PAGE) as memory:
        begin = addressof(c_char.from_buffer(memory))
        sampler = measure_host.Sampler(os.getpid(), [begin])
        memory[0] = 1
        assert sampler.again()[1] == 1
        memory[0] = 0
        assert sampler.again()[1] == 1


@given(st.lists(st.integers(1, 500), min_size=1, max_size=4), st.integers(1, 2000))
def test_places_are_spread_over_all_regions(pages: list[int], samples: int) -> None:
    regions, begin = [], 1 << 30
    for count in pages:
        regions.append((begin, begin + count * PAGE))
        begin += (count + 7) * PAGE

    found = measure_host.places(regions, samples)

    assert len(found) == min(samples, sum(pages))
    assert found == sorted(set(found))
    assert all(any(a <= one < b for a, b in regions) for one in found)


MAPS = """\
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
7f0020000000-7f005ffff000 rwxp 00000000 00:00 0
7f0060000000-7f0061000000 rw-p 00000000 00:00 0
7f0070000000-7f0080000000 r--p 00000000 00:00 0
"""


def test_the_guests_memory_is_found_among_the_mappings() -> None:
    size = 256 * MIB

    assert measure_host.mappings(MAPS, [size]) == [(0x7F0000000000, 0x7F0010000000)]
    with pytest.raises(measure_host.MeasureRefused):
        measure_host.mappings(MAPS, [size, size])


@pytest.mark.parametrize(
    ("command", "sizes"),
    [
        ('-object\0{"qom-type":"memory-backend-ram","id":"pc.ram","size":268435456}', [268435456]),
        ("-object\0memory-backend-file,id=a,size=1024\0-object\0memory-backend-ram,size=2048",
         [1024, 2048]),
        ("-m\0256", [7]),
    ],
)  # fmt: skip
def test_sizes_are_read_from_qemus_command_line(command: str, sizes: list[int]) -> None:
    assert measure_host.backends(command, 7) == sizes


def program(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it as a host does: its text on stdin."""
    text = resources.files("vmckpt.remote.scripts").joinpath("measure_host.py").read_text()
    return subprocess.run(
        [sys.executable, "-", *words], input=text, text=True, capture_output=True, check=False,
        timeout=30,
    )  # fmt: skip


def test_what_a_host_cannot_do_is_one_line() -> None:
    done = program("memory", "no-such-uuid", "no-such-guest", "1048576", "16", "0.1")

    assert done.returncode == 1
    assert done.stderr == "libvirt has no record of the guest's QEMU process\n"


def test_strangers_are_not_served() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    serving = threading.Thread(target=measure_host.receive, args=(server, b"secret", 2.0))
    serving.start()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"hello!")
        assert stranger.recv(10) == b""

    answer = measure_host.send("127.0.0.1", port, "secret", 0.5)
    serving.join(5)
    server.close()

    assert isinstance(answer, dict)
    seen = measure.link_seen(answer["marks"])
    assert seen is not None
    assert seen.rate > MIB


def test_a_listener_that_nobody_calls_ends_by_itself() -> None:
    done = program("listen", "127.0.0.1", "secret", "0")
    port = int(done.stdout.partition(":")[2].strip(" }\n"))

    assert port in measure_host.PORTS
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return
            except OSError:
                time.sleep(0.2)
    raise AssertionError("it still listens")
