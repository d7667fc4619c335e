"""Hosts of libvirt's test driver, with one guest or none."""

from pathlib import Path

UUID = "11111111-1111-4111-8111-111111111111"
_GUEST = f"""<domain type='test'><name>web1</name><uuid>{UUID}</uuid><memory>65536</memory>
<os><type>hvm</type></os></domain>"""
_NODE = """<node><cpu><mhz>1000</mhz><model>m</model><active>2</active><nodes>1</nodes>
<sockets>1</sockets><cores>2</cores><threads>1</threads></cpu><memory>8000000</memory>{}</node>"""


def node(path: Path, *, guest: bool = True) -> str:
    """Write such a host's description; its URI."""
    path.write_text(_NODE.format(_GUEST if guest else ""))
    return f"test://{path}"
