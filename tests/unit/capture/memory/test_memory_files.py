"""Copies of a guest's memory: where they are kept, and when they go."""

import os
import subprocess
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from tests.support.scratch_qemu import Scratch
from vmckpt.capture.memory import memory_files, ram_blocks
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.errors import CannotCapture
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.util import host_directories

UUID = "3e6f1c52-0000-4000-8000-000000000001"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are kept, as long as the test lasts."""
    monkeypatch.setattr(host_directories, "RUN", tmp_path / "run")
    monkeypatch.setattr(host_directories, "SHM", tmp_path)
    return memory_files.root()


def test_a_copy_goes_with_its_process(root: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        folder = memory_files.place(UUID, process.pid)
        memory_files.watch(folder, process.pid)
        folder.mkdir()
        memory_files.sweep()
        assert folder.is_dir()
        process.kill()
    give_up = time.monotonic() + 20
    while any(root.iterdir()):
        assert time.monotonic() < give_up, list(root.iterdir())
        time.sleep(0.05)


def test_what_nobody_watches_is_swept_unless_it_is_still_stored(root: Path) -> None:
    folder = root / f"{UUID}-1-77"  # no process of that number began then
    folder.mkdir()
    (root / "not ours").mkdir()
    with memory_files._locked(folder):
        memory_files.sweep()
        assert folder.exists()
    memory_files.sweep()
    assert [one.name for one in root.iterdir()] == ["not ours"]


class Monitor:
    """A guest's monitor that tells of one memory backend."""

    host, name = "alpha", "web1"

    def __init__(self, kind: str, path: str = "", *, share: bool = True, size: int = 4096) -> None:
        self.told = {"type": kind, "mem-path": path}
        self.backends = [{"id": "ram", "share": share, "size": size}] if kind else []

    def ask(self, command: str, **arguments: object) -> Any:
        if command == "query-memdev":
            return self.backends
        assert (command, arguments["path"]) == ("qom-get", "/objects/ram")
        return self.told[str(arguments["property"])]


@pytest.mark.parametrize(
    ("monitor", "why"),
    [
        (Monitor(""), "is private to QEMU"),
        (Monitor("memory-backend-ram"), "is private to QEMU"),
        (Monitor("memory-backend-memfd"), "is a memfd"),
        (Monitor("memory-backend-epc"), "is a memory-backend-epc"),
        (Monitor("memory-backend-file", share=False), "but not shared"),
        (Monitor("memory-backend-file", "/no/such/file"), "is not mapped by QEMU"),
    ],
)
def test_memory_that_is_no_file_of_all_is_refused_with_the_reason(monitor: Any, why: str) -> None:
    with HeldProcess(os.getpid()) as process, pytest.raises(CannotCapture, match=why):
        memory_files.files(monitor, process)


@pytest.fixture
def mapped() -> Iterator[Path]:
    """A file on tmpfs that this process has mapped, of five pages."""
    with NamedTemporaryFile(dir="/dev/shm", prefix="vmckpt-test-") as file:
        file.truncate(5 * 4096)
        with mmap(file.fileno(), 5 * 4096) as memory:
            memory[:4] = b"here"
            yield Path(file.name)


def test_a_file_that_qemu_has_mapped_is_found_and_opened(mapped: Path) -> None:
    monitor: Any = Monitor("memory-backend-file", str(mapped), size=5 * 4096)
    with HeldProcess(os.getpid()) as process:
        (found,) = memory_files.files(monitor, process)
        opened = found.open(os.O_RDONLY)
    assert found.names == ("ram", "/objects/ram")
    assert os.pread(opened, 4, 0) == b"here"
    os.close(opened)


def test_a_memfd_is_found_for_what_needs_no_migration() -> None:
    made = os.memfd_create("memory-backend-memfd")
    os.ftruncate(made, 7 * 4096)
    os.pwrite(made, b"here", 4096)
    monitor: Any = Monitor("memory-backend-memfd", size=7 * 4096)
    with HeldProcess(os.getpid()) as process, mmap(made, 7 * 4096):
        (found,) = memory_files.files(monitor, process, memfd=True)
        opened = found.open(os.O_RDONLY)
        assert os.pread(opened, 4, 4096) == b"here"
        os.close(opened)
    os.close(made)
    with HeldProcess(os.getpid()) as process, pytest.raises(CannotCapture, match="is not mapped"):
        memory_files.files(monitor, process, memfd=True)


DIMMS = tuple(
    word
    for number in range(3)
    for word in (
        "-object", f"memory-backend-memfd,id=memdimm{number},size=64M,share=on",
        "-device", f"pc-dimm,id=dimm{number},memdev=memdimm{number}",
    )
)  # fmt: skip


def test_memfds_of_the_same_size_are_told_apart() -> None:
    """Else a standby with two such DIMMs or NUMA nodes would have both memories in one."""
    more = ("-m", "slots=4,maxmem=1G", *DIMMS)
    with Scratch(accelerator="tcg", more=more, waits=True) as guest, HeldProcess(
        guest.pid
    ) as held:  # fmt: skip
        found = memory_files.files(guest, held, memfd=True)
        assert [one.names[0] for one in found] == ["memdimm0", "memdimm1", "memdimm2", "pc.ram"]
        for number, one in enumerate(found[:3]):
            opened = one.open(os.O_RDWR)
            os.pwrite(opened, bytes([number + 1]), 0)
            os.close(opened)
        for one in guest.ask("query-memory-devices"):
            at, name = one["data"]["addr"], one["data"]["id"]
            told = guest.ask("human-monitor-command", **{"command-line": f"xp /1xb {at:#x}"})
            assert int(told.split()[-1], 16) == int(name.removeprefix("dimm")) + 1


def test_memory_has_an_order_that_other_objects_do_not_change() -> None:
    """QEMU lists its objects in no order: standby and guest would mean different memory."""
    more = ("-m", "slots=4,maxmem=1G", *DIMMS)
    with Scratch(accelerator="tcg", more=more) as guest, HeldProcess(guest.pid) as held:
        orders, told = [], set()
        for number in range(24):
            guest.tell("object-add", {"qom-type": "secret", "id": f"secret{number}", "data": "x"})
            told.add(tuple(one["id"] for one in guest.ask("query-memdev")))
            orders.append([one.names[0] for one in memory_files.files(guest, held, memfd=True)])
        assert len(told) > 1, "else this test shows nothing"
        assert {*map(tuple, orders)} == {("memdimm0", "memdimm1", "memdimm2", "pc.ram")}
        assert [one.name for one in ram_blocks.find(guest, held).guest] == orders[0]


def test_a_range_is_of_a_shared_file_or_of_none() -> None:
    maps = "1000-3000 rw-s 00000000 00:01 7 /memfd:x (deleted)\n5000-7000 rw-p 00000000 00:00 0\n"
    with HeldProcess(os.getpid()) as process:
        found = memory_files.shared_file(maps, process, MemoryRange(0x1000, 0x2000))
        assert found is not None
        assert (found.size, found.path.name, found.qemu) == (0x2000, "1000-3000", process)
        for other in (MemoryRange(0x1000, 0x1000), MemoryRange(0x5000, 0x2000)):
            assert memory_files.shared_file(maps, process, other) is None


def test_a_file_of_a_qemu_that_has_ended_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "ram").touch()
    with subprocess.Popen(["sleep", "60"]) as qemu, HeldProcess(qemu.pid) as process:
        file = MemoryFile(("ram",), 0, tmp_path / "ram", process)
        os.close(file.open(os.O_RDONLY))
        process.end(5.0)
        with pytest.raises(ProcessLookupError, match="has ended"):
            file.open(os.O_RDONLY)


def test_a_file_system_is_known_by_its_device() -> None:
    mounts = (
        "22 1 0:20 / /proc rw - proc proc rw\n"
        "30 22 0:25 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw\n"
    )
    assert memory_files.file_system(mounts, os.makedev(0, 25)) == "tmpfs"
    assert memory_files.file_system(mounts, os.makedev(0, 26)) == "an unknown file system"
