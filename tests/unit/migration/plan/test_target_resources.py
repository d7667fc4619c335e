from dataclasses import replace

import pytest

from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Answer, Resource
from vmckpt.migration.plan.target_resources import combine, paths
from vmckpt.remote.target_probe import TargetProbe
from vmckpt.units import GIB, Bytes

PROBED = TargetProbe(
    addresses=frozenset({"10.0.0.12"}), any_address=False, ports=frozenset({5901}),
    free_pages={2048: Bytes(GIB)}, default_page=2048,
)  # fmt: skip
FILE = Resource(kind=Kind.FILE, name="/boot/k")
TEMPLATE = Resource(kind=Kind.FILE, name="/t.fd", unless="/n.fd")
SECRET = Resource(kind=Kind.SECRET, name="s")


def one(kind: Kind, name: str, probed: TargetProbe | None = PROBED) -> Answer | None:
    wanted = Resource(kind=kind, name=name)
    return combine([wanted], {}, {}, probed, Bytes(GIB)).get(wanted)


CASES = [
    (Kind.ADDRESS, "10.0.0.12", Answer.PRESENT), (Kind.ADDRESS, "10.0.0.11", Answer.ABSENT),
    (Kind.ADDRESS, "127.0.0.5", Answer.PRESENT), (Kind.ADDRESS, "beta.example", None),
    (Kind.PORT, "5901", Answer.ABSENT), (Kind.PORT, "5902", Answer.PRESENT),
    (Kind.HUGE_PAGES, "2048", Answer.PRESENT), (Kind.HUGE_PAGES, "", Answer.PRESENT),
    (Kind.HUGE_PAGES, "1048576", Answer.ABSENT),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "answer"), CASES)
def test_addresses_ports_and_pages_are_answered_by_the_probe(
    kind: Kind, name: str, answer: Answer | None
) -> None:
    assert one(kind, name) == answer
    assert one(kind, name, None) is None


def test_an_address_may_be_any_where_the_kernel_allows_it_or_none_could_be_read() -> None:
    assert one(Kind.ADDRESS, "1.2.3.4", replace(PROBED, any_address=True)) is Answer.PRESENT
    assert one(Kind.ADDRESS, "1.2.3.4", replace(PROBED, addresses=frozenset())) is Answer.PRESENT


def test_paths_are_looked_for_and_libvirts_answers_are_kept() -> None:
    assert paths([FILE, TEMPLATE, SECRET]) == {"/boot/k", "/t.fd", "/n.fd"}
    found = combine(
        [FILE, TEMPLATE, SECRET], {SECRET: Answer.NO_VALUE},
        {"/boot/k": False, "/t.fd": False, "/n.fd": True}, None, Bytes(0),
    )  # fmt: skip

    assert found == {
        FILE: Answer.ABSENT, TEMPLATE: Answer.ABSENT, SECRET: Answer.NO_VALUE,
        Resource(kind=Kind.FILE, name="/n.fd"): Answer.PRESENT,
    }  # fmt: skip
    assert combine([FILE], {}, {}, None, Bytes(0)) == {}
