"""Where a guest's firmware keeps its variables. Pure."""

from xml.etree import ElementTree as ET


def path_of(root: ET.Element) -> str | None:
    """The file on its host, in either of libvirt's forms; None: it has none, or not as a file."""
    node = root.find("os/nvram")
    if node is None:
        return None
    source = node.find("source")
    path = (node.text or "").strip() or (source.get("file") if source is not None else None)
    return path if path and path.startswith("/") else None
