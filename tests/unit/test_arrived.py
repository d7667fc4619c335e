"""What becomes of images once their guest has arrived: old ones go only if nobody has them."""

import asyncio
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.shell import Shell
from tests.unit.sights import vm
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import guests
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migrate import arrived
from vmckpt.migrate.arrived import Tidied
from vmckpt.migrate.gather import Remotes
from vmckpt.model.guests import Guest
from vmckpt.model.images import CopyPlan, DiskCopy
from vmckpt.units import MIB, Bytes


class Scene:
    """An image on a source, and its copy on a target."""

    def __init__(self, folder: Path) -> None:
        self.there: list[Guest] = []
        """Guests of the source."""
        self.old, self.new = folder / "old.raw", folder / "new.raw"
        self.old.write_bytes(bytes(MIB))
        self.new.write_bytes(bytes(1))
        self.remotes: Remotes = (Shell(folder), Shell(folder))

    def plan(self, *, removes: bool = True, full: bool = False) -> CopyPlan:
        copy = DiskCopy(
            name="vda", source=str(self.old), path=str(self.new), format="raw", size=Bytes(MIB),
            needed=Bytes(MIB), allocated=Bytes(MIB), full=full, options="", mode="600",
        )  # fmt: skip
        return CopyPlan(copies=(copy,), removes=removes)

    async def meant(self, **plan: bool) -> dict[str, Any]:
        said = await arrived.meant(self.remotes[0], self.plan(**plan))
        return {"paths": [str(self.new)], **said}

    async def finish(self, intent: dict[str, Any], *, logins: bool = True) -> Tidied:
        here = Hypervisor(self.remotes[0].host)
        return await arrived.finish(intent, here, self.remotes if logins else None)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(tmp_path)

    async def all_guests(_: object) -> list[Guest]:
        return made.there

    monkeypatch.setattr(guests, "all_guests", all_guests)
    return made


async def test_the_old_image_goes_and_is_not_missed_the_second_time(scene: Scene) -> None:
    meant = await scene.meant()
    done = Tidied(removed=(str(scene.old),))
    assert await scene.finish(meant) == done
    assert (scene.old.exists(), scene.new.exists()) == (False, True)
    assert await scene.finish(meant) == done


async def test_without_the_policys_leave_it_stays(scene: Scene) -> None:
    assert await scene.finish(await scene.meant(removes=False)) == Tidied()
    assert scene.old.exists()


async def test_a_raw_image_that_is_to_be_full_gets_its_room(scene: Scene) -> None:
    await scene.finish(await scene.meant(full=True))
    assert scene.new.stat().st_blocks * 512 >= MIB


@pytest.mark.parametrize("what", ["disk", "below", "nvram"])
async def test_one_that_a_guest_there_has_stays(scene: Scene, what: str) -> None:
    """Also the guest itself, whose definition is still there."""
    meant = await scene.meant()
    path = str(scene.old)
    guest = vm("b")
    disk = guest.disks[0]
    has: dict[str, Any] = {
        "disk": {"disks": (replace(disk, source=path),)},
        "below": {"disks": (replace(disk, below=(path,)),)},
        "nvram": {"nvram": path},
    }
    scene.there = [vm("a"), replace(guest, **has[what])]
    done = await scene.finish(meant)
    assert (done.removed, len(done.troubles)) == ((), 1)
    assert "guest b has it" in done.troubles[0]
    assert scene.old.exists()


async def test_another_file_of_that_name_stays(scene: Scene) -> None:
    meant = await scene.meant()
    scene.old.rename(scene.old.with_suffix(".kept"))
    scene.old.write_text("somebody else's")
    done = await scene.finish(meant)
    assert "not the same file" in done.troubles[0]
    assert scene.old.read_text() == "somebody else's"


async def test_a_link_stays_and_what_it_leads_to(scene: Scene) -> None:
    itself = scene.old.rename(scene.old.with_suffix(".itself"))
    scene.old.symlink_to(itself)
    done = await scene.finish(await scene.meant())
    assert "no plain file" in done.troubles[0]
    assert scene.old.is_symlink()
    assert itself.exists()


async def test_one_that_a_qemu_has_open_stays(scene: Scene, tmp_path: Path) -> None:
    meant = await scene.meant()
    drive = f"if=none,id=d,format=raw,file={scene.old}"
    qemu = [
        "qemu-system-x86_64", "-S", "-display", "none", "-m", "64", "-drive", drive, "-device",
        "virtio-blk-pci,drive=d", "-pidfile", str(tmp_path / "pid"), "-daemonize",
    ]  # fmt: skip
    await asyncio.to_thread(subprocess.run, qemu, check=True)
    try:
        done = await scene.finish(meant)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    assert "a QEMU has it open" in done.troubles[0]
    assert scene.old.exists()


async def test_it_stays_while_its_copy_may_not_be_on_its_disk(scene: Scene) -> None:
    meant = await scene.meant()
    scene.new.unlink()
    done = await scene.finish(meant)
    assert (done.removed, "may not be on its disk" in done.troubles[0]) == ((), True)
    assert scene.old.exists()


async def test_what_could_not_be_done_is_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = await scene.meant(full=True)
    done = await scene.finish(meant, logins=False)
    assert [str(scene.new) in done.troubles[0], str(scene.old) in done.troubles[1]] == [True, True]

    async def silent(_: object) -> list[Guest]:
        raise HypervisorError("it does not answer", host="alpha")

    monkeypatch.setattr(guests, "all_guests", silent)
    done = await scene.finish(meant)
    assert done.troubles == (f"{scene.old} is still on alpha: it does not answer",)
    assert scene.old.exists()
