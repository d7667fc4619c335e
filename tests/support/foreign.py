"""Definitions of kinds that trials with other projects' guests have brought up."""

from pathlib import Path
from xml.etree import ElementTree as ET

from vmckpt.hypervisor import domain_xml
from vmckpt.model.guest import Guest

FOLDER = Path(__file__).parents[1] / "fixtures/foreign"


def text(name: str) -> str:
    return (FOLDER / f"{name}.xml").read_text()


def root(name: str) -> ET.Element:
    return domain_xml.tree(text(name), "domain")


def guest(name: str) -> Guest:
    """The guest as a host would describe it while it runs."""
    return domain_xml.guest(
        text(name), state=1, persistent=True, autostart=False, snapshots=0, job=None
    )
