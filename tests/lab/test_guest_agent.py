"""The guest agent's protocol, through libvirt and a virtio-serial port, to one in a guest."""

import gzip
import lzma
import subprocess
import threading
import time
from importlib import resources
from pathlib import Path

import pytest

from tests.lab.bench import WHOLE, Bench, until
from tests.lab.test_disk_capture import Sitting, uuid
from vmckpt.capture.fs_freeze import FsFreeze, FsFreezeUndo
from vmckpt.hypervisor import qmp
from vmckpt.hypervisor.guest_agent import GuestAgent, thaw_left
from vmckpt.units import Seconds
from vmckpt_lab import guest_image, guests
from vmckpt_lab.plan import LabPlan

# Stands in for qemu-ga: what is "frozen" is the program that writes.
RESPONDER = r"""#!/bin/sh
insmod /modules/virtio_console.ko
until set -- /dev/vport*p1; [ -e "$1" ]; do sleep 0.1; done
exec 3<>"$1"
now=thawed
say() { echo "{\"return\": $1}" >&3; }
while :; do
    # As long as libvirt has not connected, there is an end and no line.
    read -r line <&3 || { sleep 0.1; continue; }
    case "$line" in
    *guest-sync*) id=${line##*id\":}; say "${id%%[!0-9]*}" ;;
    *guest-ping*) say "{}" ;;
    *guest-get-time*) say "$(date +%s)500000000" ;;
    *guest-set-time*)
        nano=${line##*time\":}; nano=${nano%%[!0-9 ]*}; nano=${nano# }
        date -s "@${nano%?????????}" >/dev/null; say "{}" ;;
    *fsfreeze-status*) say "\"$now\"" ;;
    *fsfreeze-freeze*)
        [ -z "$VMC_SLOW_AGENT" ] || sleep "$VMC_SLOW_AGENT"
        kill -STOP $(pidof prover); now=frozen; say 1 ;;
    *fsfreeze-thaw*) kill -CONT $(pidof prover); now=thawed; say 1 ;;
    esac
done
"""
CHANNEL = """<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
  </devices>"""


def with_responder(known: guest_image.Image, folder: Path) -> guest_image.Image:
    """The lab's image with a responder; what comes later in an initramfs replaces what was."""
    root = folder / "root"
    (root / "modules").mkdir(parents=True)
    (found,) = (known.kernel.parent / "modules").glob("**/virtio_console.ko*")
    module = found.read_bytes()
    module = lzma.decompress(module) if found.suffix == ".xz" else module
    (root / "modules/virtio_console.ko").write_bytes(module)
    init = (resources.files("vmckpt_lab") / "assets/init").read_text()
    for name, text in (("init", init.replace("\n/prover", "\n/agent &\n/prover")),
                       ("agent", RESPONDER)):  # fmt: skip
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    names = "init\0agent\0modules\0modules/virtio_console.ko\0"
    packed = subprocess.run(
        ["cpio", "--null", "--create", "--format=newc", "--owner=0:0", "--quiet"],
        input=names.encode(), cwd=root, capture_output=True, check=True,
    )  # fmt: skip
    both = folder / "initramfs"
    both.write_bytes(known.initramfs.read_bytes() + gzip.compress(packed.stdout))
    return guest_image.Image(known.kernel, both)


def started(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch, *, slow: float = 0.0,
    shared_memory: bool = False, stays: bool = False,
) -> None:  # fmt: skip
    """A guest with a responder. The image must be where the hosts see it, and `stays` there if it
    is to be started again elsewhere."""
    known, describe = guest_image.prepare(), guests.domain_xml
    made = with_responder(known, folder)
    seen = bench.plan.shared / "agent-initramfs"
    seen.write_bytes(made.initramfs.read_bytes())

    def described(lab: LabPlan, guest: guests.LabGuest, booted: guest_image.Image) -> str:
        words = f" VMC_SLOW_AGENT={slow:g}</cmdline>" if slow else "</cmdline>"
        return (
            describe(lab, guest, booted)
            .replace("</cmdline>", words)
            .replace("</devices>", CHANNEL)
        )  # fmt: skip

    with monkeypatch.context() as patch:
        patch.setattr(guest_image, "prepare", lambda: guest_image.Image(known.kernel, seen))
        patch.setattr(guests, "domain_xml", described)
        try:
            bench.guest(
                memory="128MiB",
                dirty="4MiB@1MiB/s",
                disk="8MiB",
                shared_memory=shared_memory,
                boot=True,
            )
        finally:
            if not stays:
                seen.unlink()


def still(bench: Bench) -> bool:
    """Whether it writes nothing for a while; what it had written has been heard by then."""
    before = bench.seen().highest
    time.sleep(0.3)
    return bench.seen().highest == before


def goes_on(bench: Bench) -> None:
    """Wait until it has written something."""
    before = bench.seen().highest
    until(lambda: bench.seen().highest > before)


@pytest.mark.long
def test_a_guest_is_held_still_and_always_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(bench, tmp_path, monkeypatch)
    notes: list[FsFreezeUndo] = []
    with Sitting(uuid(bench), host="alpha", uri=bench.inventory.host("alpha").uri) as sitting:
        agent = GuestAgent(sitting)
        until(agent.there)
        known = uuid(bench)
        with FsFreeze(agent, guest=known, limit=Seconds(20.0), note=notes.append) as quiet:
            assert agent.frozen()
            assert still(bench)
            assert quiet.release()
            assert not agent.frozen()
        assert quiet.finding("web1") is None
        goes_on(bench)

        with FsFreeze(agent, guest=known, limit=Seconds(1.0), note=notes.append) as quiet:
            until(lambda: not quiet.held)
            until(lambda: not agent.frozen())
        finding = quiet.finding("web1")
        assert finding is not None
        assert finding.code == "thawed-early"

        agent.freeze(limit=Seconds(5.0))  # and killed
        assert still(bench)
        thawed = bench.ask(
            "alpha",
            lambda hypervisor: qmp.call_on_domain(
                hypervisor, notes[0].guest, "thawing",
                lambda there: thaw_left(GuestAgent(there)), changes=True,
            ),
        )  # fmt: skip
        assert thawed
        goes_on(bench)
        assert not thaw_left(agent)
    assert [t for t in threading.enumerate() if t.name == "thaw"] == []
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_freeze_that_comes_too_late_is_undone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(bench, tmp_path, monkeypatch, slow=3.0)
    with Sitting(uuid(bench), host="alpha", uri=bench.inventory.host("alpha").uri) as sitting:
        agent = GuestAgent(sitting)
        until(agent.there)
        with FsFreeze(
            agent, guest=uuid(bench), limit=Seconds(1.0), note=lambda _: None
        ) as quiet:  # fmt: skip
            assert not quiet.held
        finding = quiet.finding("web1")
        assert finding is not None
        assert finding.code in ("not-frozen", "thawed-early")
        time.sleep(3.0)  # the freeze comes now, and is undone
        until(lambda: not agent.frozen())
        goes_on(bench)
    assert bench.ledgers() == WHOLE
