"""When two names in the inventory are one host, and when two hosts have one UUID."""

from dataclasses import replace

import pytest

from vmckpt.errors import InventoryError
from vmckpt.model.same_host import SameUuid, Sighting, judge, left_out, require_distinct

SECOND = 1_000_000_000
NAMES = ("alpha", "alpha2")
BEFORE = Sighting(
    uuid="u", hostname="alpha", running={"g-1": 3, "g-2": 5},
    cpu={"kernel": 100 * SECOND, "user": 900 * SECOND, "idle": 50_000 * SECOND},
)  # fmt: skip


def later(seconds: float, sighting: Sighting = BEFORE) -> Sighting:
    used = round(seconds * SECOND)
    return replace(sighting, cpu={kind: value + used for kind, value in sighting.cpu.items()})


def judged(other: Sighting, after: Sighting | None = None) -> SameUuid | None:
    return judge(NAMES, BEFORE, other, after or later(0.4))


def test_one_libvirtd_under_two_names_is_one_host() -> None:
    found = judged(later(0.2))

    assert found is not None
    assert found.one
    assert found.text == "alpha and alpha2 are one host"
    assert found.hint == "leave alpha or alpha2 out of hosts.yaml"


def test_a_host_name_may_have_its_domain_or_not() -> None:
    found = judged(replace(later(0.2), hostname="Alpha.example.com"))

    assert found is not None
    assert found.one


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(later(0.2), hostname="beta"), "their host names are alpha and beta"),
        (later(300), "they have used different amounts of CPU time since they started"),
        (later(-300), "they have used different amounts of CPU time since they started"),
        (
            replace(later(0.2), cpu={**later(0.2).cpu, "user": 20 * SECOND}),
            "they have used different amounts of CPU time since they started",
        ),
    ],
)
def test_cloned_hosts_are_two(other: Sighting, why: str) -> None:
    found = judged(other)

    assert found is not None
    assert found.one is False
    assert found.text == (
        f"alpha and alpha2 have the same libvirt host UUID, but are two hosts: {why}"
    )
    assert "set host_uuid" in found.hint


@pytest.mark.parametrize(
    ("other", "after", "why"),
    [
        (later(2), later(0.4), "their CPU times are similar, but not the same"),
        (replace(later(0.2), cpu={}), later(0.4), "libvirt reports no CPU times"),
        (replace(later(0.2), running={"g-1": 4}), later(0.4), "they report different guests"),
    ],
)
def test_what_is_not_proven_is_unknown(other: Sighting, after: Sighting, why: str) -> None:
    """Clones that have just been started may agree in much; a guess could end the only copy."""
    found = judged(other, after)

    assert found is not None
    assert found.one is None
    assert found.text == f"it is unknown whether alpha and alpha2 are one host: {why}"
    assert found.hint == "run vmckpt doctor alpha alpha2"


def test_a_guest_that_starts_meanwhile_does_not_make_two_hosts() -> None:
    more = {**BEFORE.running, "g-3": 6}
    found = judged(replace(later(0.2), running=more), replace(later(0.4), running=more))

    assert found is not None
    assert found.one


def test_hosts_with_uuids_of_their_own_are_not_reported() -> None:
    assert judged(replace(later(0.2), uuid="v")) is None
    assert judge(NAMES, replace(BEFORE, uuid=""), replace(BEFORE, uuid=""), BEFORE) is None


ONE = SameUuid(first="alpha", second="alpha2", one=True)
TWO = SameUuid(first="alpha", second="beta", one=False, why="x")
UNKNOWN = SameUuid(first="alpha", second="gamma", one=None, why="gamma is silent")


def test_one_host_is_an_error_and_two_hosts_are_not() -> None:
    require_distinct([TWO])
    assert left_out([ONE, TWO, UNKNOWN]) == {"alpha2"}
    with pytest.raises(InventoryError, match="alpha and alpha2 are one host; nothing was changed"):
        require_distinct([UNKNOWN, TWO, ONE])
    with pytest.raises(InventoryError, match="it is unknown whether alpha and gamma are one host"):
        require_distinct([TWO, UNKNOWN])
