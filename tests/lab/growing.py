"""Guests that memory can be plugged into, and that say whether its content is right."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench import Bench, until
from vmckpt_lab import guest_image, guests
from vmckpt_lab.guest_image import Image
from vmckpt_lab.plan import LabPlan
from vmckpt_lab.shell import run

GUEST: dict[str, Any] = {
    "memory": "160MiB", "dirty": "32MiB@2MiB/s", "disk": "32MiB", "disk_format": "qcow2",
}  # fmt: skip
MIB = 256
"""Size of a DIMM."""
DIMM = f"""<memory model='dimm'><target><size unit='MiB'>{MIB}</size><node>0</node></target>
</memory>"""
USES = """#!/bin/busybox sh
blocks=/sys/devices/system/memory
while [ "$(awk '/MemTotal/ {print $2}' /proc/meminfo)" -lt 300000 ]; do
    for block in $blocks/memory*/state; do
        grep -q offline $block && echo online >$block
    done
    sleep 1
done 2>/dev/null
mkdir /more
mount -t tmpfs -o size=300m none /more
file=0
while [ $file -lt 50 ]; do
    { echo $file; cat /bin/busybox; } >/more/$file
    file=$((file + 1))
done
md5sum /more/* >/sums
echo "uses: filled"
while :; do
    md5sum -c /sums >/dev/null 2>&1 && echo "uses: right $file" || echo "uses: WRONG"
    one=/more/$((file % 50))
    dd if=/dev/urandom of=$one bs=64k seek=$((file % 16)) count=2 conv=notrunc 2>/dev/null
    { grep -v " $one$" /sums; md5sum $one; } >/sums.new
    mv /sums.new /sums
    file=$((file + 1))
    sleep 1
done
"""
"""In the guest: it fills more memory than it had, and goes on changing it."""


def plug(bench: Bench, how: str = "attach-device", *, on: str = "alpha", slot: int = 0) -> None:
    """Plug a DIMM into a slot of the guest, or out of it."""
    file = bench.plan.shared / "uses/dimm.xml"
    place = f"<address type='dimm' slot='{slot}' base='{(4 << 30) + slot * (MIB << 20):#x}'/>"
    file.write_text(DIMM.replace("</memory>", f"{place}</memory>"))
    bench.inside(on, "virsh", "-q", how, "web1", str(file), "--live")


def dimms(bench: Bench, on: str, name: str = "web1") -> list[str]:
    """The DIMMs of a QEMU."""
    text = json.dumps({"execute": "query-memory-devices"})
    told = json.loads(bench.inside(on, "virsh", "qemu-monitor-command", name, text))["return"]
    return sorted(one["data"]["id"] for one in told)


def turns(bench: Bench, on: str) -> int:
    """How often the guest has found its memory right since its QEMU was started there."""
    console = Path(bench.plan.host(on).root, "log", "web1.console").read_text(errors="replace")
    assert "uses: WRONG" not in console, console[-2000:]
    return console.count("uses: right")


def goes_right(bench: Bench, on: str, count: int = 2) -> None:
    """Wait until the guest has found its memory right so many more times."""
    before = turns(bench, on)
    until(lambda: turns(bench, on) >= before + count, limit=240.0)


@contextmanager
def growing(plan: LabPlan, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Guests that are started in the block have slots for DIMMs, and use what is plugged in."""
    folder = plan.shared / "uses"  # a host sees no /tmp but its own
    image = _image(folder)
    usual = guests.domain_xml

    def domain_xml(lab: LabPlan, guest: guests.LabGuest, booted: Image) -> str:
        cell = f"<numa><cell id='0' cpus='0' memory='{guest.memory >> 10}' unit='KiB'/></numa>"
        slots = "<maxMemory slots='4' unit='MiB'>2048</maxMemory>\n  <memory "
        xml = usual(lab, guest, booted).replace("<memory ", slots, 1)
        # Else Linux sets 64 MiB aside, since memory above 4 GiB may come.
        xml = xml.replace("quiet ", "quiet swiotlb=noforce ", 1)
        return xml.replace("</model></cpu>", f"</model>{cell}</cpu>")

    with monkeypatch.context() as patched:
        patched.setattr(guest_image, "prepare", lambda: image)
        patched.setattr(guests, "domain_xml", domain_xml)
        yield
    run(["rm", "-rf", str(folder)])


def _image(folder: Path) -> Image:
    """The guest's image; files of a later archive replace those of one before."""
    usual, root = guest_image.prepare(), folder / "root"
    root.mkdir(parents=True)
    init = (Path(guest_image.__file__).parent / "assets/init").read_text()
    (root / "init").write_text(init.replace("\n/prover\n", "\n/uses &\n/prover\n"))
    (root / "uses").write_text(USES)
    for name in ("init", "uses"):
        (root / name).chmod(0o755)
    guest_image._pack(root, folder / f"more.{os.getpid()}.cpio")
    both = folder / "initramfs.cpio"
    more = folder / f"more.{os.getpid()}.cpio"
    both.write_bytes(usual.initramfs.read_bytes() + more.read_bytes())
    run(["chmod", "-R", "a+rX", str(folder)])
    return replace(usual, initramfs=both)
