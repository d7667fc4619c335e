"""Who looks out for two copies does see them."""

from tests.lab.bench import Bench, until
from vmckpt.hypervisor.domains import define_and_start
from vmckpt_lab import guest_image, guests
from vmckpt_lab.invariants import Checker, Lookout


def test_two_running_copies_are_seen_and_one_is_not(bench: Bench) -> None:
    guest = bench.guest(
        memory="128MiB", dirty="8MiB@10MiB/s", disk="8MiB", private_disk=True
    )  # fmt: skip
    checker = Checker(bench.plan)
    with Lookout(bench.plan) as lookout:
        until(lambda: lookout.looks > 20)
        assert lookout.two_copies() == []
        assert checker.settled("web1", ["alpha"]) == []
        bench.inside("beta", "truncate", "--size", "8M", guest.disk_path)
        xml = guests.domain_xml(bench.plan, guest, guest_image.prepare())
        bench.ask("beta", lambda hypervisor: define_and_start(hypervisor, xml))
        until(lambda: "web1 on beta" in " ".join(lookout.two_copies()))

    assert "2 QEMU processes" in checker.settled("web1", ["alpha"], limit=0.0)[0]


def test_a_definition_left_behind_and_a_strange_limit_are_seen(bench: Bench) -> None:
    bench.guest(memory="128MiB", dirty="8MiB@10MiB/s", disk="8MiB")
    xml = bench.inside("alpha", "virsh", "dumpxml", "web1")
    path = bench.plan.folder / "web1.xml"
    path.write_text(xml)
    bench.inside("beta", "virsh", "-q", "define", str(path))
    bench.inside("alpha", "virsh", "-q", "migrate-setmaxdowntime", "web1", "5000")
    wrong = Checker(bench.plan).settled("web1", ["alpha"], limit=0.0)

    assert wrong == [
        "the guest's downtime limit is 5 s on alpha",
        "the guest is still defined on beta",
    ]
