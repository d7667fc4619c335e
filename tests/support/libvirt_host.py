"""A host of libvirt's test driver with one guest, which runs; each connection has its own."""

from pathlib import Path

from vmckpt.model.host import Host

UUID = "11111111-1111-4111-8111-111111111111"
GUEST = f"""<domain type='test'><name>web1</name><uuid>{UUID}</uuid><memory>65536</memory>
<os><type>hvm</type></os></domain>"""
_NODE = f"""<node><cpu><mhz>1000</mhz><model>m</model><active>2</active><nodes>1</nodes>
<sockets>1</sockets><cores>2</cores><threads>1</threads></cpu><memory>8000000</memory>
{GUEST}</node>"""


def host(folder: Path, *, read_only: bool = False) -> Host:
    """The host; its guest is called web1."""
    (folder / "node.xml").write_text(_NODE)
    return Host(name="alpha", uri=f"test://{folder}/node.xml", read_only=read_only)
