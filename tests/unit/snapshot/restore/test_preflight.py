"""A definition of another host is looked at before anything is restored, unless it is trusted."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.snapshots import FACTS, PUBLIC
from vmckpt.errors import BadInput
from vmckpt.hypervisor import domains
from vmckpt.model.host import Host
from vmckpt.snapshot.request import RestoreRequest
from vmckpt.snapshot.restore import preflight
from vmckpt.snapshot.restore import restore as restore_restore
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.store.format.metadata import DiskMake

XML = """<domain type='kvm'><name>web1</name><devices><disk type='file'>
<source file='{image}'/><target dev='vda'/></disk>{more}</devices></domain>"""
HOST = Host(name="beta", uri="test:///default", storage=("/srv/images",))


class Begun(Exception):
    """The restore went on to its journal."""


class Libvirt:
    """A connection to it."""

    host = HOST

    def __init__(self, *_: object) -> None:
        pass

    async def __aenter__(self) -> "Libvirt":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


def opened(image: str, more: str = "") -> Opened:
    facts = replace(
        FACTS, domain_xml=XML.format(image=image, more=more),
        disks=(DiskMake(target="vda", format="qcow2", size=1, options=""),),
    )  # fmt: skip
    private = SimpleNamespace(facts=facts, files={})
    return cast("Opened", SimpleNamespace(public=PUBLIC, private=private))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What libvirt has stored of the guest there."""
    known: dict[str, Any] = {"xml": None}

    async def look(*_: object) -> object:
        return None if known["xml"] is None else SimpleNamespace(stored=known["xml"])

    async def checked(*_: object) -> tuple[str, ...]:
        return ()

    def operation(*_: object) -> None:
        raise Begun

    monkeypatch.setattr(restore_restore, "Hypervisor", Libvirt)
    monkeypatch.setattr(restore_restore, "_operation", operation)
    monkeypatch.setattr(preflight, "checked", checked)
    monkeypatch.setattr(domains, "inspect_guest", look)
    return known


async def restore(of: Opened, **request: Any) -> None:
    hosts: Mapping[str, Host] = {}
    caller = cast("Any", None)
    await restore_restore.restore(
        HOST, of, RestoreRequest(snapshot="s", **request), caller, hosts=hosts
    )


HARMLESS = opened("/srv/images/web1.qcow2")
HARMFUL = opened("/srv/images/web1.qcow2", "<shmem name='other'/>")
OUTSIDE = opened("/etc/cron.d/web1.qcow2")


async def test_one_that_is_harmless_is_restored(here: Mapping[str, Any]) -> None:
    with pytest.raises(Begun):
        await restore(HARMLESS)


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (HARMFUL, "<devices/shmem> is not known"),
        (OUTSIDE, "'/etc/cron.d/web1.qcow2', outside the storage directories of beta"),
    ],
)
async def test_one_that_may_not_be_is_refused_by_name_before_anything_is_begun(
    here: Mapping[str, Any], of: Opened, why: str
) -> None:
    with pytest.raises(BadInput, match=f"refusing to restore .* on beta: .*{why}") as caught:
        await restore(of)
    assert "--trust-definition" in str(caught.value)


@pytest.mark.parametrize("of", [HARMFUL, OUTSIDE])
async def test_one_that_the_operator_trusts_is_restored(
    here: Mapping[str, Any], of: Opened
) -> None:
    with pytest.raises(Begun):
        await restore(of, trust_definition=True)


async def test_what_the_guest_has_there_already_it_may_have_again(here: dict[str, Any]) -> None:
    here["xml"] = HARMFUL.private.facts.domain_xml
    with pytest.raises(Begun):
        await restore(HARMFUL)
