"""A lab guest with firmware in flash memory, and NVRAM beside it."""

from pathlib import Path

from tests.lab.bench import Bench, until

NVRAM = "/var/lib/libvirt/qemu/nvram/web1_VARS.fd"


def with_nvram(bench: Bench) -> None:
    """Give the guest firmware in flash memory, and NVRAM beside it, and start it anew."""
    firmware, template = bench.plan.shared / "code.fd", bench.plan.shared / "vars.fd"
    firmware.write_bytes(Path("/usr/share/seabios/bios-256k.bin").read_bytes())
    template.write_bytes(b"first start ".ljust(128 << 10, b"\xff"))
    bench.inside("alpha", "virsh", "destroy", "web1")
    xml = bench.inside("alpha", "virsh", "dumpxml", "--inactive", "web1")
    more = (
        f"<loader readonly='yes' type='pflash'>{firmware}</loader>"
        f"<nvram template='{template}'>{NVRAM}</nvram></os>"
    )
    described = bench.plan.shared / "web1.xml"
    described.write_text(xml.replace("</os>", more))
    bench.inside("alpha", "virsh", "define", str(described))
    bench.inside("alpha", "virsh", "start", "web1")
    until(lambda: bench.seen().runs == 2, limit=60)
