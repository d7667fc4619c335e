"""Read libvirt's RELAX NG schema of domains: all places that contain free text or a path."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

FOLDER = Path("/usr/share/libvirt/schemas")
_NAMESPACE = "{http://relaxng.org/ns/structure/1.0}"
_DEEPEST, _REPEATS = 9, 2

NAMES = frozenset({
    "", "NCName", "UUID", "PortNumber", "absDirPath", "absFilePath", "addrIPorName", "cpuset",
    "dbusAddr", "deviceName", "dnsName", "filePath", "genericName", "ipAddr", "ipv4Addr",
    "objectName", "objectNameWithSlash", "string", "text", "vmwarePath", "volName", "wwn",
})  # fmt: skip
"""Types of values that may name something on a host; "": any text."""


class _Schema:
    def __init__(self) -> None:
        self.definitions: dict[str, list[ET.Element]] = {}
        self._load("domaincommon.rng")
        self.found: dict[str, set[str]] = {}
        for node in self.definitions["domain"]:
            self._walk(node, (), ("domain",))

    def _load(self, name: str) -> None:
        root = ET.parse(FOLDER / name).getroot()
        for node in root.iter(_NAMESPACE + "include"):
            self._load(node.get("href", ""))
        for node in root.iter(_NAMESPACE + "define"):
            self.definitions.setdefault(node.get("name", ""), []).append(node)

    def _walk(self, node: ET.Element, path: tuple[str, ...], stack: tuple[str, ...]) -> None:
        for child in node:
            tag, name = child.tag.removeprefix(_NAMESPACE), child.get("name", "")
            if tag == "attribute":
                types = set(self._types(child, ())) if len(child) else {""}
                self._note((*path, f"@{name}"), types)
            elif tag == "element" and name:
                below = (*path, name)
                if len(below) <= _DEEPEST and below.count(name) <= _REPEATS:
                    self._note(below, set(self._types(child, ())))
                    self._walk(child, below, stack)
            elif tag == "ref" and stack.count(name) < _REPEATS:
                for one in self.definitions[name]:
                    self._walk(one, path, (*stack, name))
            elif tag != "element":
                self._walk(child, path, stack)

    def _note(self, path: tuple[str, ...], types: set[str]) -> None:
        if types:
            self.found.setdefault("/".join(path[1:]), set()).update(types)

    def _types(self, node: ET.Element, seen: tuple[str, ...]) -> Iterator[str]:
        """Yield the types of an attribute's or element's own value."""
        for child in node:
            tag, name = child.tag.removeprefix(_NAMESPACE), child.get("name", "")
            if tag in ("data", "text"):
                yield child.get("type", "text")
            elif tag == "ref" and name not in seen:
                for one in self.definitions[name]:
                    if any(True for _ in self._types(one, (*seen, name))):
                        yield name
            elif tag not in ("element", "attribute", "value", "ref"):
                yield from self._types(child, seen)


@cache
def naming_places() -> dict[str, frozenset[str]]:
    """Return the elements and attributes whose value may name something, with their types.

    An element is named by its path below `domain`: "devices/disk/source/@file".
    """
    return {
        path: frozenset(types & NAMES) for path, types in _Schema().found.items() if types & NAMES
    }
