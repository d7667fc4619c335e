"""A guest that has two copies is never passed over in silence: what decides, and who shows it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.metrics import key, scraped
from tests.support.replicas import LEASE, session
from tests.support.two_copies import BOTH, OVER, TWICE, WORKS
from tests.tui.still import FLEET, NOW, entry, guest
from vmckpt import recovery as recovering
from vmckpt.agent.replication import orders, teardown
from vmckpt.errors import TwoCopies
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.model.guest import MEND, merged, two_copies
from vmckpt.monitor import alerts
from vmckpt.monitor.alerts import State
from vmckpt.monitor.health import HealthSnapshot, troubles
from vmckpt.monitor.prometheus import Exporter
from vmckpt.protection.agent_status import parse_answer
from vmckpt.protection.copies import of_protections, second_copy
from vmckpt.units import Seconds


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ({}, {}, None),
        (WORKS, {"role": "backup", "runs": True}, None),
        (WORKS, {"error": "silent"}, None),
        (WORKS, OVER, "its standby has taken over, but its QEMU on the primary is still running"),
        (WORKS, {**OVER, "runs": False}, None),
        ({**WORKS, "runs": False}, OVER, None),
        ({"role": "backup", "runs": True}, OVER, None),
        ({**WORKS, "lease_holder": "beta"}, {"error": "silent"}, "beta holds its lease"),
        ({**WORKS, "lease_holder": "alpha"}, {"error": "silent"}, None),
        ({**WORKS, "lease_holder": "beta", "runs": False}, {"error": "silent"}, None),
    ],
)  # fmt: skip
def test_what_agents_say_counts_as_well(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], why: str | None
) -> None:
    assert second_copy(parse_answer(ours), parse_answer(theirs), "alpha") == why


def test_a_guest_that_both_libvirt_and_agents_show_is_one() -> None:
    told = of_protections([BOTH])
    seen = two_copies([("gamma", guest(6, "safe", "gamma")), ("alpha", guest(6, "safe", "alpha"))])
    (one,) = merged(seen, told)
    assert (one.guest, one.hosts) == ("safe", ("gamma", "alpha", "beta"))
    assert one.text.startswith(
        "safe may be running on gamma and alpha and beta: its standby has taken over"
    )
    assert of_protections([entry()]) == ()


@pytest.mark.parametrize(
    ("holder", "expected"),
    [("beta", {"lease_holder": "beta", "runs": True}), ("alpha", {}), (None, {}), ("silent", {})],
)
def test_a_guest_without_an_agent_says_who_holds_its_lease(
    monkeypatch: pytest.MonkeyPatch, holder: str | None, expected: dict[str, Any]
) -> None:
    @contextmanager
    def lease(_: object) -> Iterator[Any]:
        def look() -> Any:
            if holder == "silent":
                raise LeaseUnreachable("the lease store is silent")
            return SimpleNamespace(holder=holder)

        yield SimpleNamespace(look=look)

    monkeypatch.setattr(teardown, "lease", lease)
    monkeypatch.setattr(identity, "runs", lambda _: True)
    assert orders._another_holds(session(lease=LEASE)) == expected
    assert orders._another_holds(session(lease=LEASE, role="backup")) == {}
    assert orders._another_holds(session()) == {}


def test_what_recovery_was_refused_for_two_copies_stays_known_as_that() -> None:
    told = recovering._unsettled(TwoCopies("web1 runs on both", hint="choose"))
    assert (told.two_copies, told.outcome, told.settle) == (True, None, "choose")
    assert told.as_json()["two_copies"] is True


SEEN = replace(FLEET, copies=(TWICE,))


@pytest.mark.parametrize(
    ("standing", "guest_name"),
    [
        (HealthSnapshot(fleet=SEEN), "web1"),
        (HealthSnapshot(protections={"p-9abc": BOTH}), "safe"),
    ],
)
def test_prometheus_and_the_operator_are_told(standing: HealthSnapshot, guest_name: str) -> None:
    exporter = Exporter()
    exporter.now = standing
    told = {one: value for one, value in scraped(exporter).items() if one[0].endswith("copies")}
    (one,) = told
    labels = dict(one[1])
    assert (one[0], labels["guest"], labels["hosts"]) == (
        "vmckpt_guest_copies", guest_name, "alpha beta",
    )  # fmt: skip
    assert told == {key("guest_copies", **labels): 2}
    (name, trouble), *_ = [
        (name, one) for name, one in troubles(standing).items() if name.startswith("copies")
    ]
    assert trouble.text.startswith(f"two copies: {guest_name} ")
    assert " running on alpha and beta" in trouble.text
    assert (trouble.hint, trouble.guest, trouble.host) == (MEND, guest_name, "alpha")

    known, pages = alerts.watch({}, {name: trouble}, Seconds(0.0), NOW)
    assert pages == []
    known, pages = alerts.watch(known, {name: trouble}, Seconds(31.0), NOW)
    assert [(page.state, page.as_json()["guest"]) for page in pages] == [(State.FIRING, guest_name)]
    _, pages = alerts.watch(known, {}, Seconds(60.0), NOW)
    assert [page.state for page in pages] == [State.RESOLVED]


def test_where_each_guest_runs_once_nobody_is_told() -> None:
    exporter = Exporter()
    exporter.now = standing = HealthSnapshot(fleet=FLEET, protections={"p-9abc": entry()})
    assert [one for one in scraped(exporter) if one[0].endswith("guest_copies")] == []
    assert [name for name in troubles(standing) if name.startswith("copies")] == []
