"""A guest made ready for snapshots: its definition is changed, and a restart brings it about."""

import pytest

from tests.lab.bench import WHOLE, Bench, until, uuid
from vmckpt.capture.prepare_domain import Prepared, prepare
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.domains import Definition
from vmckpt.model.finding import Severity


def looked(bench: Bench) -> tuple[Definition, Prepared]:
    known = uuid(bench)
    found = bench.ask("alpha", lambda hypervisor: domains.stored_definition(hypervisor, known))
    return found, prepare(found.text, found.running, found.disks)


@pytest.mark.long
def test_a_guest_is_prepared_by_a_definition_and_a_restart(bench: Bench) -> None:
    bench.guest(memory="128MiB", dirty="4MiB@1MiB/s", disk="8MiB", disk_format="qcow2")
    known = uuid(bench)
    before, wanted = looked(bench)
    xml = wanted.xml
    assert xml is not None
    assert wanted.restart
    bench.ask(
        "alpha",
        lambda hypervisor: domains.write(hypervisor, known, xml, instead_of=before.text),
    )
    with pytest.raises(HypervisorError, match="has changed in the meantime"):
        bench.ask(
            "alpha",
            lambda hypervisor: domains.write(hypervisor, known, xml, instead_of=before.text),
        )
    _, waiting = looked(bench)
    assert (waiting.xml, waiting.restart) == (None, True)
    assert bench.ledgers() == WHOLE  # nothing has happened to the guest yet

    bench.inside("alpha", "virsh", "-q", "destroy", "web1")
    bench.inside("alpha", "virsh", "-q", "start", "web1")
    after, found = looked(bench)
    assert (found.xml, found.restart) == (None, False)
    assert {finding.severity for finding in found.findings} <= {Severity.OK, Severity.INFO}
    assert after.running is not None
    source = after.running.find("memoryBacking/source")
    assert source is not None
    assert source.get("type") == "file"
    until(lambda: bench.seen().runs == 2)
