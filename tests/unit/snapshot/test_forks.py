"""A family's order: names, paths and definitions of its forks; and what agents answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.support.fork_agent import XML
from tests.support.snapshots import FACTS, PUBLIC
from vmckpt.agent import client
from vmckpt.agent.fork_orders import ForkChild
from vmckpt.capture.disks import lazy_overlay
from vmckpt.errors import BadInput, RemoteError
from vmckpt.model.disk import StorePlace
from vmckpt.model.host import Host
from vmckpt.snapshot import forks
from vmckpt.snapshot.request import RestoreRequest
from vmckpt.snapshot.restore import restore
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.store.format.metadata import Contents, DiskMake
from vmckpt.store.format.private_part import Private
from vmckpt.units import Seconds

HOST = Host(name="alpha", uri="test:///default")


def opened(xml: str = XML, *, format_: str = "raw", memory: bool = True) -> Opened:
    disk = DiskMake(target="vda", format=format_, size=1, options="")
    facts = replace(FACTS, domain_xml=xml, disks=(disk,))
    contents = Contents.MEMORY if memory else Contents.DISKS
    return Opened(
        store=StorePlace(name="near", url="/x"), public=replace(PUBLIC, contents=contents),
        private=Private(facts=facts, chunks=[], regions=(), files={"nvram": b"n"}), data_key=None,
        trusted=frozenset(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("xml", "format_"), [(XML, "raw"), (XML.replace("raw", "qcow2").replace(".img", ""), "qcow2")]
)
@pytest.mark.parametrize(("folder", "there"), [(None, "/srv/vm"), ("/srv/forks", "/srv/forks")])
def test_each_fork_is_a_guest_of_its_own_with_overlays(
    xml: str, format_: str, folder: str | None, there: str
) -> None:
    made, warnings = forks.children(opened(xml, format_=format_), ["t-1", "t-2", "t-3"], folder)
    assert warnings == ()
    roots = [ET.fromstring(one.xml) for one in made]
    for one, root in zip(made, roots, strict=True):
        assert (root.findtext("name"), root.findtext("uuid")) == (one.name, one.guest)
        assert one.images["vda"] == f"{there}/{one.name}-vda.qcow2"
        assert one.images["nvram"] == f"/var/lib/libvirt/qemu/nvram/{one.name}_VARS.fd"
        links = [node.get("state") for node in root.findall("devices/interface/link")]
        assert links == ["down"]
        # The agent makes the disk an overlay, whatever its format in the snapshot is.
        disk = ET.fromstring(lazy_overlay.behind(one.xml, {"vda": "/run/s"})).find("devices/disk")
        assert disk is not None
        driver, source = disk.find("driver"), disk.find("source")
        assert driver is not None
        assert source is not None
        assert (driver.get("type"), source.get("file")) == ("qcow2", one.images["vda"])
    for path in ("name", "uuid", "devices/interface/mac", "devices/disk/source"):
        assert len({ET.tostring(found) for root in roots for found in root.findall(path)}) == 3


def test_forks_of_a_family_never_share_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    macs = iter(["52:54:00:00:00:0a", "52:54:00:00:00:0a", "52:54:00:00:00:0b"])
    monkeypatch.setattr(restore, "_new_mac", lambda: next(macs))
    first, second = forks.children(opened(), ["a", "b"], None)[0]
    assert "52:54:00:00:00:0a" in first.xml
    assert "52:54:00:00:00:0b" in second.xml


def test_a_restore_keeps_the_names_of_its_images() -> None:
    plan = restore.planned(opened(), RestoreRequest(snapshot="s-1", fork="twin"))
    assert plan.images["vda"] == "/srv/vm/twin-vda.img"


def test_a_snapshot_without_memory_is_refused() -> None:
    with pytest.raises(BadInput, match=r"of web1 has no memory .* fork the running guest, or run"):
        forks.children(opened(memory=False), ["a"], None)


def test_each_warning_is_given_once() -> None:
    serial = (
        "<serial type='tcp'><source mode='bind' host='h' service='1'/><target port='0'/></serial>"
    )
    xml = XML.replace("</devices>", f"{serial}</devices>")
    _, warnings = forks.children(opened(xml), ["a", "b"], None)
    assert len(warnings) == 1


MADE = (
    ForkChild(guest="u-1", name="a", xml="", images={}),
    ForkChild(guest="u-2", name="b", xml="", images={}),
)


def test_every_ordered_fork_has_a_result() -> None:
    told = {
        "took": 2,
        "children": [
            {"guest": "u-9", "name": "x", "took": 0, "clock_not_set": "", "error": ""},
            {"guest": "u-1", "name": "x", "took": 1.5, "clock_not_set": "no agent", "error": ""},
        ],
    }
    (first, second), took = forks.started(told, MADE)
    assert (first.name, first.took, first.clock_not_set, first.error) == ("a", 1.5, "no agent", "")
    assert (second.name, second.error) == ("b", "the agent did not report this fork")
    assert took == Seconds(2)


FAMILY = {
    "family": "fam-1", "template": "web1", "snapshot": "s-1", "store": "near",
    "children": [
        {"guest": "u-1", "name": "a", "runs": True, "memory_bytes": 5, "disk_bytes": 6},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("told", "good"),
    [
        ({"families": [FAMILY]}, True),
        ({"families": []}, True),
        ({"families": {}}, False),
        ({}, False),
        ({"families": [{**FAMILY, "children": 1}]}, False),
        ({"families": [{**FAMILY, "children": [{"guest": "u"}]}]}, False),
        ({"families": [{**FAMILY, "children": [{**FAMILY["children"][0],  # type: ignore[dict-item]
                                               "memory_bytes": -1}]}]}, False),
    ],
)  # fmt: skip
async def test_what_is_no_family_is_an_error_of_its_host(
    monkeypatch: pytest.MonkeyPatch, told: Mapping[str, Any], good: bool
) -> None:
    async def run_order(_: object, order: Mapping[str, Any], *__: object) -> Mapping[str, Any]:
        assert (order["do"], order["host"]) == ("families", "alpha")
        return told

    monkeypatch.setattr(client, "run_order", run_order)
    if good:
        found = await forks.families(HOST)
        assert [one.id for one in found] == ["fam-1"] * len(told["families"])
        assert [fork.memory for one in found for fork in one.forks] == [5] * len(found)
        return
    with pytest.raises(RemoteError, match="alpha: invalid message from vmckpt-agent"):
        await forks.families(HOST)


@pytest.mark.parametrize("took", [-1, "1", True, None, 1e300, float("nan")])
def test_what_is_no_duration_is_refused(took: object) -> None:
    with pytest.raises(ValueError, match="expected a number of seconds"):
        forks.started({"children": [], "took": took}, ())
