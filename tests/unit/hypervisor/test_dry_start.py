"""What libvirt's test driver answers; the lab asks a real libvirt the rest."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import libvirt
import pytest
import pytest_asyncio

from tests.support import libvirt_host
from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Answer, Resource
from vmckpt.hypervisor import dry_start
from vmckpt.hypervisor.connection import Hypervisor

CAPABILITIES = """<capabilities><host><topology><cells><cell id='0'><cpus><cpu id='0'/><cpu id='1'/>
</cpus></cell></cells></topology><secmodel><model>dac</model></secmodel></host></capabilities>"""


@pytest_asyncio.fixture
async def alpha(tmp_path: Path) -> AsyncIterator[Hypervisor]:
    async with Hypervisor(libvirt_host.host(tmp_path)) as found:
        yield found


async def asked(host: Hypervisor, kind: Kind, name: str) -> Answer | None:
    wanted = Resource(kind=kind, name=name)
    return (await dry_start.ask(host, [wanted])).get(wanted)


class Fails:
    """A call of libvirt that fails with an error code."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __call__(self, *_: Any) -> None:
        error = libvirt.libvirtError("no")
        vars(error)["err"] = (self.code, 0, "no", 2, "no", None, None, 0, 0)
        raise error


async def test_a_network_that_does_not_exist_or_is_off_is_told_apart(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Network:
        def isActive(self) -> int:
            return 0

    assert await asked(alpha, Kind.NETWORK, "none") is Answer.ABSENT
    monkeypatch.setattr(libvirt.virConnect, "networkLookupByName", lambda *_: Network())
    assert await asked(alpha, Kind.NETWORK, "lan") is Answer.INACTIVE


async def test_a_volume_is_not_reported_beside_its_missing_pool(alpha: Hypervisor) -> None:
    assert await asked(alpha, Kind.POOL, "none") is Answer.ABSENT
    assert await asked(alpha, Kind.VOLUME, "none/v") is None


async def test_a_driver_that_the_host_lacks_leaves_the_answer_open(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Fails(libvirt.VIR_ERR_NO_SUPPORT)
    monkeypatch.setattr(libvirt.virConnect, "nwfilterLookupByName", call)

    assert await asked(alpha, Kind.NWFILTER, "clean-traffic") is None
    call.code = libvirt.VIR_ERR_NO_NWFILTER
    assert await asked(alpha, Kind.NWFILTER, "clean-traffic") is Answer.ABSENT


async def test_a_secret_needs_a_value(alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Secret:
        value = Fails(libvirt.VIR_ERR_NO_SECRET)

    uuid = "0a81f5b2-8403-7b23-c8d6-21ccc2f80d6f"
    monkeypatch.setattr(
        libvirt.virConnect, "secretLookupByUUIDString", Fails(libvirt.VIR_ERR_NO_SECRET)
    )
    assert await asked(alpha, Kind.SECRET, uuid) is Answer.ABSENT
    monkeypatch.setattr(libvirt.virConnect, "secretLookupByUUIDString", lambda *_: Secret())
    assert await asked(alpha, Kind.SECRET, uuid) is Answer.NO_VALUE
    Secret.value = Fails(libvirt.VIR_ERR_INVALID_ARG)  # a private secret
    assert await asked(alpha, Kind.SECRET, uuid) is Answer.PRESENT


async def test_cpus_nodes_and_security_drivers_are_read_from_the_capabilities(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libvirt.virConnect, "getCapabilities", lambda *_: CAPABILITIES)

    assert await asked(alpha, Kind.CPU, "1") is Answer.PRESENT
    assert await asked(alpha, Kind.CPU, "8") is Answer.ABSENT
    assert await asked(alpha, Kind.NUMA_NODE, "1") is Answer.ABSENT
    assert await asked(alpha, Kind.SECURITY_MODEL, "dac") is Answer.PRESENT
    assert await asked(alpha, Kind.SECURITY_MODEL, "selinux") is Answer.ABSENT
    bare = "<capabilities><host/></capabilities>"
    monkeypatch.setattr(libvirt.virConnect, "getCapabilities", lambda *_: bare)
    assert await asked(alpha, Kind.CPU, "8") is None


async def test_a_cid_of_another_guest_is_taken(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    xml = "<domain><devices><vsock><cid auto='no' address='42'/></vsock></devices></domain>"
    monkeypatch.setattr(libvirt.virDomain, "XMLDesc", lambda *_: xml)

    assert await asked(alpha, Kind.VSOCK_CID, "42") is Answer.ABSENT
    assert await asked(alpha, Kind.VSOCK_CID, "43") is Answer.PRESENT


CARDS = """<domain type='kvm'><devices><interface type='hostdev'/><hostdev type='pci'/>
<video/></devices></domain>"""


async def test_a_dry_start_leaves_out_what_crashes_libvirt(
    alpha: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    monkeypatch.setattr(
        libvirt.virConnect, "domainXMLToNative", lambda *given: sent.append(given[2])
    )

    assert await dry_start.refusal(alpha, CARDS) is None
    assert "<video" in sent[0]
    assert "hostdev" not in sent[0]


async def test_a_dry_start_tells_libvirts_reason_unless_it_may_not_be_asked(
    alpha: Hypervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Fails(libvirt.VIR_ERR_CONFIG_UNSUPPORTED)
    monkeypatch.setattr(libvirt.virConnect, "domainXMLToNative", call)

    assert await dry_start.refusal(alpha, CARDS) == "no"
    for code in (libvirt.VIR_ERR_NO_SUPPORT, libvirt.VIR_ERR_CPU_INCOMPATIBLE):
        call.code = code
        assert await dry_start.refusal(alpha, CARDS) is None
    call.code = libvirt.VIR_ERR_CONFIG_UNSUPPORTED
    async with Hypervisor(libvirt_host.host(tmp_path, read_only=True)) as beta:
        assert await dry_start.refusal(beta, CARDS) is None


async def test_volumes_are_looked_for_only_if_there_are_any(alpha: Hypervisor) -> None:
    disk = "<disk type='volume'><source pool='p' volume='v'/><target dev='vda'/></disk>"

    assert await dry_start.volumes(alpha, "<domain/>") == {}
    assert await dry_start.volumes(alpha, f"<domain><devices>{disk}</devices></domain>") == {}
