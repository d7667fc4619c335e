"""A lab guest with a guest agent, which a script stands in for."""

import gzip
import lzma
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from tests.lab.bench import Bench
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
    *guest-network-get-interfaces*)
        found=
        for one in /sys/class/net/*; do
            name=${one##*/}
            ip=$(ip -o -4 address show dev "$name" | sed -n 's|.* inet \([0-9.]*\)/\([0-9]*\) .*|'\
'{"ip-address-type":"ipv4","ip-address":"\1","prefix":\2}|p' | tr '\n' ,)
            found="$found,{\"name\":\"$name\",\"hardware-address\":\"$(cat "$one/address")\","
            found="$found\"ip-addresses\":[${ip%,}]}"
        done
        say "[${found#,}]" ;;
    *guest-exec-status*)
        said=$(base64 /error | tr -d '\n')
        say "{\"exited\":true,\"exitcode\":$status,\"err-data\":\"$said\"}" ;;
    *resumed.d*) : >/error; status=0; say '{"pid":7}' ;;
    *guest-exec*)
        path=${line##*\"path\":}; path=${path#*\"}; path=${path%%\"*}
        words=${line##*\"arg\":}; words=${words#*[}; words=${words%%]*}
        "$path" $(echo "$words" | tr '",' '  ') 2>/error >/dev/null; status=$?
        say '{"pid":7}' ;;
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
