"""Faults in a migration: how each fault is prepared, injected in its phase, and repaired.

An `Injury` injects a fault into one migration. `FAULTS` creates the injury for a kind of fault.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from vmckpt.errors import LabError
from vmckpt_lab import host, lab, network
from vmckpt_lab.command_runner import Controller, End
from vmckpt_lab.faults import inject
from vmckpt_lab.plan import LabPlan


class Fault(StrEnum):
    """A kind of fault."""

    NOTHING = "nothing"
    CONTROLLER_KILLED = "controller-killed"
    SOURCE_LIBVIRTD = "source-libvirtd-killed"
    TARGET_LIBVIRTD = "target-libvirtd-killed"
    SOURCE_QEMU = "source-qemu-killed"
    TARGET_QEMU = "target-qemu-killed"
    SOURCE_OFF = "source-powered-off"
    TARGET_OFF = "target-powered-off"
    SOURCE_CUT = "source-cut-off"
    TARGET_CUT = "target-cut-off"
    CUT_FOR_GOOD = "target-cut-off-for-good"
    DISK_FULL = "target-disk-full"
    MEMORY_FULL = "target-memory-full"
    JOURNAL_FULL = "journal-disk-full"
    CLOCK_AHEAD = "clock-jumps-ahead"
    CLOCK_BACK = "clock-jumps-back"
    POSTGRES = "postgresql-restarted"
    TWO_SAME = "second-controller-same-target"
    TWO_OTHER = "second-controller-other-target"


@dataclass(slots=True)
class Scene:
    """A migration, with the data that an injury may need."""

    plan: LabPlan
    guest: str
    source: str
    target: str
    other: str
    """A third host, neither source nor target."""
    order: tuple[str, ...]
    """Options of the migrate command, in addition to guest and target."""
    state: Path
    """Directory of the controllers' journal."""
    more: dict[str, str] = field(default_factory=dict)
    """Additional environment of the controllers."""
    controller: Controller | None = None
    others: list[Controller] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    """Results of the other controllers."""

    def start(self, to: str, more: Mapping[str, str] | None = None) -> Controller:
        """Start a controller that migrates the guest to host `to`."""
        given = {"VMCKPT_STATE": str(self.state), **self.more, **(more or {})}
        words = ("migrate", self.guest, "--to", to, *self.order)
        return Controller(self.plan, *words, more=given)


class Injury:
    """A fault in a migration. This base class does nothing."""

    lasts = 0.0
    """Seconds until the fault is repaired; infinity: repaired after the controller has exited."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def prepare(self) -> None:
        """Prepare the fault, before the controller starts."""

    def aim(self) -> None:
        """Find the process to strike. Called while the controller is running, before the fault."""

    def strike(self) -> bool:
        """Inject the fault. Returns False if the process to strike did not exist."""
        return True

    def repair(self) -> None:
        """Repair the fault. May be called twice, or without a preceding `strike`."""

    def clear(self) -> None:
        """Remove what `prepare` created. Called last."""


class ControllerKilled(Injury):
    """The controller is killed with SIGKILL."""

    def strike(self) -> bool:
        assert self.scene.controller is not None
        return self.scene.controller.kill()


class LibvirtdKilled(Injury):
    """A host's libvirtd is killed with SIGKILL and restarted; QEMU keeps running."""

    lasts = 1.5

    def __init__(self, scene: Scene, where: str) -> None:
        super().__init__(scene)
        self._where = where
        self._pid = 0

    def aim(self) -> None:
        self._pid = inject.libvirtd(self.scene.plan, self._where)

    def strike(self) -> bool:
        return inject.kill(self._pid)

    def repair(self) -> None:
        inject.start_libvirtd(self.scene.plan, self._where)


class QemuKilled(Injury):
    """A QEMU process of the guest is killed with SIGKILL, as by the kernel's OOM killer.

    Waits up to `appears` seconds for a QEMU process that is about to start on the target.
    """

    appears = 3.0

    def __init__(self, scene: Scene, where: str) -> None:
        super().__init__(scene)
        self._where = where

    def strike(self) -> bool:
        give_up = time.monotonic() + self.appears
        while (copy := inject.qemu(self.scene.plan, self.scene.guest, self._where)) is None:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.01)
        return inject.kill(copy.pid)


class PoweredOff(Injury):
    """A host is powered off and on again: all its processes die at once."""

    lasts = 2.0

    def __init__(self, scene: Scene, where: str) -> None:
        super().__init__(scene)
        self._host = scene.plan.host(where)
        self._pid: int | None = None

    def aim(self) -> None:
        self._pid = host.first_process(self._host)

    def strike(self) -> bool:
        # When the first process dies, the kernel kills all others; `power_off` waits for this.
        struck = self._pid is not None and inject.kill(self._pid)
        host.power_off(self._host)
        return struck

    def repair(self) -> None:
        lab.heal(self.scene.plan, self._host.name)


class CutOff(Injury):
    """A host is cut off from the network for a while; its guests' network stays up."""

    def __init__(self, scene: Scene, where: str, lasts: float) -> None:
        super().__init__(scene)
        self._where = where
        self.lasts = lasts

    def strike(self) -> bool:
        network.cut(self.scene.plan, self._where)
        return True

    def repair(self) -> None:
        network.heal(self.scene.plan, self._where)


class DiskFull(Injury):
    """The target's disk becomes full while an image is copied to it."""

    lasts = 3.0

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        plan = scene.plan
        self._disk = inject.SmallDisk(plan.private, mib=160, plan=plan, name=scene.target)

    def prepare(self) -> None:
        self._disk.mount()

    def strike(self) -> bool:
        self._disk.fill()
        return True

    def repair(self) -> None:
        self._disk.free()

    def clear(self) -> None:
        left = sorted(path.name for path in self._disk.seen.iterdir())
        self._disk.unmount()
        if left:
            raise LabError(f"files left on the target's disk: {', '.join(left)}")


class MemoryFull(Injury):
    """The target does not have enough memory to start the guest's QEMU process."""

    lasts = float("inf")

    def prepare(self) -> None:
        inject.starve(self.scene.plan, self.scene.target, spare=48 << 20)

    def repair(self) -> None:
        inject.feed(self.scene.plan, self.scene.target)


class JournalFull(Injury):
    """The disk that holds the journal becomes full."""

    lasts = float("inf")

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._disk = inject.SmallDisk(scene.state, mib=8, plan=scene.plan)

    def prepare(self) -> None:
        self.scene.state.mkdir(parents=True, exist_ok=True)
        self._disk.mount()

    def strike(self) -> bool:
        self._disk.fill()
        return True

    def repair(self) -> None:
        self._disk.free()

    def clear(self) -> None:
        self._disk.unmount()


class ClockJumps(Injury):
    """The controller's wall clock jumps, and jumps back after a while."""

    lasts = 2.0

    def __init__(self, scene: Scene, seconds: int) -> None:
        super().__init__(scene)
        self._seconds = seconds
        self._clock = inject.Clock(scene.plan.folder / "clock")

    def prepare(self) -> None:
        self.scene.more.update(self._clock.environment)

    def strike(self) -> bool:
        self._clock.jump(self._seconds)
        return True

    def repair(self) -> None:
        self._clock.jump(0)

    def clear(self) -> None:
        for name in self._clock.environment:
            self.scene.more.pop(name, None)


class PostgresRestarted(Injury):
    """The journal's database is restarted without a clean shutdown."""

    def strike(self) -> bool:
        inject.restart_postgres(self.scene.plan)
        return True


class SecondController(Injury):
    """A second controller is started to migrate the same guest."""

    def __init__(self, scene: Scene, to: str) -> None:
        super().__init__(scene)
        self._to = to

    def strike(self) -> bool:
        self.scene.others.append(self.scene.start(self._to))
        return True

    def repair(self) -> None:
        while self.scene.others:
            self.scene.ends.append(self.scene.others.pop().end(limit=90.0))


HOUR = 3600
FAULTS: Mapping[Fault, Callable[[Scene], Injury]] = {
    Fault.NOTHING: Injury,
    Fault.CONTROLLER_KILLED: ControllerKilled,
    Fault.SOURCE_LIBVIRTD: lambda scene: LibvirtdKilled(scene, scene.source),
    Fault.TARGET_LIBVIRTD: lambda scene: LibvirtdKilled(scene, scene.target),
    Fault.SOURCE_QEMU: lambda scene: QemuKilled(scene, scene.source),
    Fault.TARGET_QEMU: lambda scene: QemuKilled(scene, scene.target),
    Fault.SOURCE_OFF: lambda scene: PoweredOff(scene, scene.source),
    Fault.TARGET_OFF: lambda scene: PoweredOff(scene, scene.target),
    Fault.SOURCE_CUT: lambda scene: CutOff(scene, scene.source, 3.0),
    Fault.TARGET_CUT: lambda scene: CutOff(scene, scene.target, 3.0),
    Fault.CUT_FOR_GOOD: lambda scene: CutOff(scene, scene.target, float("inf")),
    Fault.DISK_FULL: DiskFull,
    Fault.MEMORY_FULL: MemoryFull,
    Fault.JOURNAL_FULL: JournalFull,
    Fault.CLOCK_AHEAD: lambda scene: ClockJumps(scene, HOUR),
    Fault.CLOCK_BACK: lambda scene: ClockJumps(scene, -HOUR),
    Fault.POSTGRES: PostgresRestarted,
    Fault.TWO_SAME: lambda scene: SecondController(scene, scene.target),
    Fault.TWO_OTHER: lambda scene: SecondController(scene, scene.other),
}
