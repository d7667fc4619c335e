"""Write an edited domain XML whose unedited metadata keeps its exact text. Pure.

ElementTree renames the namespace prefixes that it writes. libvirt stores everything below
<metadata> as it receives it, and programs such as virt-manager expect their own prefixes there.
"""

import copy
from collections.abc import Iterator
from itertools import zip_longest
from xml.etree import ElementTree as ET
from xml.parsers import expat

_CHILD = 3
"""Depth of an entry below domain and metadata."""


def text(root: ET.Element, like: str) -> str:
    """Return an edited definition as text. `like`: the text from which `root` was parsed.

    Entries of the metadata that were not edited are returned exactly as they are in `like`.
    """
    entries = list(_entries(like))
    mark = "kept"
    while mark in like:
        mark += "-"
    written = copy.deepcopy(root)
    kept: dict[str, str] = {}
    for metadata in written.findall("metadata"):
        for index, node in enumerate(metadata):
            for entry in entries:
                if _same(_parsed(entry), node):
                    name = f"{mark}{len(kept)}."
                    kept[f"<{name} />"] = entry
                    metadata[index] = ET.Element(name)
                    metadata[index].tail = node.tail
                    break
    whole = ET.tostring(written, encoding="unicode")
    for placeholder, entry in kept.items():
        whole = whole.replace(placeholder, entry)
    return whole


def _entries(like: str) -> Iterator[str]:
    """Yield the text of each element in the metadata."""
    data = like.encode()
    parser = expat.ParserCreate("utf-8")
    path: list[str] = []
    begins: list[int] = []
    ends: list[int] = []

    def event(*_: object) -> None:
        if len(ends) < len(begins) and len(path) < _CHILD:  # the first event after an entry
            ends.append(parser.CurrentByteIndex)

    def start(tag: str, _: object) -> None:
        event()
        path.append(tag)
        if len(path) == _CHILD and path[1] == "metadata":
            begins.append(parser.CurrentByteIndex)

    def end(_: str) -> None:
        event()
        path.pop()

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.DefaultHandler = event
    parser.Parse(data, True)
    for first, last in zip(begins, ends, strict=True):
        yield data[first:last].decode()


def _parsed(entry: str) -> ET.Element | None:
    """Parse an entry. Returns None if it uses a prefix that is declared outside of it."""
    try:
        return ET.fromstring(entry)
    except ET.ParseError:
        return None


def _same(one: ET.Element | None, other: ET.Element | None) -> bool:
    """Return whether two elements have the same content, regardless of namespace prefixes."""
    if one is None or other is None:
        return False
    if (one.tag, one.attrib, one.text) != (other.tag, other.attrib, other.text):
        return False
    return all(
        _same(ours, theirs) and ours.tail == theirs.tail for ours, theirs in zip_longest(one, other)
    )
