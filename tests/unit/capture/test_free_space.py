"""Room on a host: looked at before a snapshot, and watched while it is taken."""

import os
from pathlib import Path
from typing import Any

import pytest

from vmckpt.capture import free_space
from vmckpt.errors import CaptureFailed
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.units import GIB, MIB, Bytes

STATUS = (
    "Name:\tqemu\nVmPeak:\t 9999999 kB\nVmRSS:\t    1024 kB\nVmSwap:\t 512 kB\n"
    "HugetlbPages:\t  2048 kB\n"
)


def test_what_a_process_holds_is_all_that_an_image_can_take() -> None:
    assert free_space.resident_memory(STATUS) == 3584 << 10
    assert free_space.resident_memory("") == 0


def test_memory_that_was_never_touched_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Monitor:
        guest = "u"

        def ask(self, command: str) -> dict[str, int]:
            return {"base-memory": 64 * GIB, "plugged-memory": GIB}

    monitor: Any = Monitor()
    monkeypatch.setattr(identity, "hold", lambda _: HeldProcess(os.getpid()))
    monkeypatch.setattr(Path, "read_text", lambda _: STATUS)
    assert free_space.memory(monitor) == 3584 << 10
    monkeypatch.setattr(identity, "hold", lambda _: None)
    assert free_space.memory(monitor) == 65 * GIB


@pytest.mark.parametrize(
    ("free", "wanted", "good"),
    [(5 * GIB, 4 * GIB, True), (5 * GIB, 4 * GIB + 1, False), (GIB, 0, True), (GIB - 1, 0, False)],
)
def test_others_keep_their_reserve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, wanted: int, good: bool
) -> None:
    monkeypatch.setattr(free_space, "free", lambda _: Bytes(free))
    if good:
        free_space.require_space(tmp_path, Bytes(wanted))
        return
    with pytest.raises(
        CaptureFailed, match=r"GiB free; .* must stay free .*; free some space there"
    ):
        free_space.require_space(tmp_path, Bytes(wanted))


def test_it_is_given_up_before_others_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, there = [0.0], [2 * GIB]
    monkeypatch.setattr(free_space, "free", lambda _: Bytes(there[0]))
    watch = free_space.Watch(tmp_path, clock=lambda: now[0])
    there[0] = 400 * MIB
    watch.look()  # it is not looked at all the time
    now[0] = 1.0
    with pytest.raises(CaptureFailed, match=r"only 400.* free; the snapshot was cancelled"):
        watch.look()
    there[0] = 600 * MIB
    now[0] = 2.0
    watch.look()
