"""What hosts say, made into a fleet: who may go where, and why not."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.builders import host_facts
from tests.support.sights import EMPTY, answers, at, by, placed, seen, vm
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan.inventory import ON_ITS_WAY, Look, Protected, TravelMethod
from vmckpt.evacuation.state import EvacuationTerms
from vmckpt.evacuation.task import Kind, Task, terms
from vmckpt.migration.forecast.forecast import Range
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Guest, GuestJob, GuestState, Nic
from vmckpt.policy.model import CopyKind
from vmckpt.units import GIB, MIB, Bytes


def test_guests_go_to_the_emptier_host() -> None:
    told = answers(at("alpha", vm("a")), at("beta", vm("b"), vm("c")), at("gamma"))
    assert placed(told) == ({"a": "gamma"}, {})


def test_what_a_host_has_free_is_no_more_than_libvirt_says() -> None:
    told = answers(at("alpha", vm("a")), at("beta", free=300 * MIB))
    going, left = placed(told)
    assert not going
    assert "MiB of memory" in left["a"]


def test_a_share_of_each_host_stays_free() -> None:
    told = answers(at("alpha", vm("a")), at("beta", free=400 * MIB))
    assert placed(told)[0] == {}
    assert placed(told, policy=by("keep_free: 1%"))[0] == {"a": "beta"}


@pytest.mark.parametrize(
    ("guest", "why"),
    [
        (vm("a", host_devices=("a card",)), "device"),
        (vm("a", snapshots=2), "snapshots"),
        (vm("a", job=GuestJob.OUTGOING), ON_ITS_WAY),
        (vm("a", job="backup"), "backup"),
        (vm("a", state=GuestState.PAUSED), "paused"),
        (vm("a", state=GuestState.STANDBY), "standby"),
        (vm("a", state=GuestState.TEST), "test"),
    ],
)
def test_some_stay_and_it_is_said_why(guest: Guest, why: str) -> None:
    going, left = placed(answers(at("alpha", guest), at("beta")))
    assert not going
    assert why in next(iter(left.values()))


def test_a_guest_that_is_off_takes_no_room_and_goes_where_its_disks_are() -> None:
    off = vm("a", state=GuestState.SHUT_OFF)
    told = answers(at("alpha", off), at("beta", free=0), at("gamma", links=frozenset()))
    assert placed(told) == ({"a": "beta"}, {})
    assert seen(told).known["a"].way is TravelMethod.OFFLINE
    unseen = answers(at("alpha", off), at("beta"), same={("alpha", "beta"): {"/srv/a.raw": False}})
    copies = replace(by(), storage=replace(by().storage, copy=CopyKind.THIN))
    assert placed(unseen)[0] == {}
    assert placed(unseen, policy=copies) == ({"a": "beta"}, {})
    assert placed(told, policy=by("move_shut_off: false"))[0] == {}
    # An old definition of a guest that runs elsewhere is nobody.
    assert placed(answers(at("alpha", off), at("beta", vm("a")))) == ({}, {})


def test_a_standby_takes_room_where_it_waits() -> None:
    standby = vm("s", state=GuestState.STANDBY, memory=Bytes(6 * GIB))
    told = answers(at("alpha", vm("a")), at("beta", standby, free=500 * MIB), at("gamma"))
    found = seen(told)
    assert {one.name for one in found.fleet.tenants} == {"a", "s on beta"}
    assert "s" not in found.known
    assert placed(told)[0] == {"a": "gamma"}


def test_a_protected_guest_goes_to_its_standby_which_has_its_memory_already() -> None:
    a = vm("a", memory=Bytes(6 * GIB))
    standby = replace(a, state=GuestState.STANDBY)
    who = {"u-a": Protected(primary="alpha", backup="beta", job="p-1")}
    told = answers(at("alpha", a), at("beta", standby, free=800 * MIB), at("gamma"), protected=who)
    assert placed(told) == ({"a": "beta"}, {})
    assert seen(told).known["a"].way is TravelMethod.SWITCH
    assert placed(told, replace(EMPTY, to=frozenset({"gamma"})))[0] == {}
    lost = answers(at("alpha", a), at("beta"), at("gamma"), protected=who)
    going, left = placed(lost)
    assert not going
    assert "p-1" in left["a"]


def test_a_standby_that_waits_there_is_to_wait_elsewhere_but_not_with_its_guest() -> None:
    a = vm("a", memory=Bytes(2 * GIB))
    who = {"u-a": Protected(primary="alpha", backup="beta", job="p-1")}
    empty = Task(kind=Kind.EVACUATE, host="beta")
    hosts = (at("alpha", a), at("beta", replace(a, state=GuestState.STANDBY)))
    blind = {("beta", "gamma"): {"/srv/a.raw": False}}  # it gets images of its own
    told = answers(*hosts, at("gamma"), protected=who, same=blind)
    assert placed(told, empty) == ({"a on beta": "gamma"}, {})
    assert seen(told, emptied="beta").known["a on beta"].way is TravelMethod.ANEW
    nowhere = seen(answers(*hosts, protected=who), emptied="beta")
    made = plans.placed(
        empty.fleet(nowhere), empty.asked(nowhere), terms(by().evacuation, empty.kind)
    )
    (left,) = plans.worded(made.left, nowhere)
    assert "the standby of a, which runs elsewhere" in left.why
    assert left.hint == "remove the standby with vmckpt unprotect a"
    # Nobody takes it away from there for another host's sake, or against its policy.
    assert seen(told, emptied="alpha").known.keys() == {"a"}
    assert list(placed(told, empty, by("strategy: leave"))[1]) == ["a on beta"]
    # What is left of an earlier protection is no business of this one.
    stale = answers(*hosts, at("gamma"), protected={"u-a": replace(who["u-a"], backup="gamma")})
    assert list(placed(stale, empty)[1]) == ["a on beta"]


def test_a_disk_that_the_other_host_does_not_see_keeps_a_guest() -> None:
    told = answers(
        at("alpha", vm("a")), at("beta"), at("gamma"),
        same={("alpha", "beta"): {"/srv/a.raw": False}, ("alpha", "gamma"): {}},
    )  # fmt: skip
    assert placed(told)[0] == {"a": "gamma"}
    copies = replace(by(), storage=replace(by().storage, copy=CopyKind.THIN))
    full = answers(
        at("alpha", vm("a")), at("beta"), same={("alpha", "beta"): {"/srv/a.raw": False}}
    )
    assert placed(full)[0] == {}
    assert placed(full, policy=copies)[0] == {"a": "beta"}


def test_the_cpu_the_machine_and_the_bridge_count() -> None:
    told = answers(at("alpha", vm("a")), at("beta"), at("gamma"), fits={"gamma": frozenset()})
    assert placed(told)[0] == {}
    other = vm("a", machine="pc-q35-9.0")
    assert "machine" in placed(answers(at("alpha", other), at("beta")))[1]["a"]
    plugged = vm("a", nics=(Nic(kind="bridge", source="br9"),))
    assert "br9" in placed(answers(at("alpha", plugged), at("beta")))[1]["a"]
    # Nobody could look: preflight warns, and libvirt decides.
    assert placed(answers(at("alpha", plugged), at("beta", links=None)))[0] == {"a": "beta"}


def test_not_where_another_guest_has_its_name() -> None:
    other = replace(vm("a"), uuid="u-other")
    told = answers(at("alpha", vm("a"), vm("b")), at("beta", other), at("gamma", free=700 * MIB))
    going, _ = placed(told)
    # Two guests have the name: both are called by their UUIDs.
    assert going == {"u-a": "gamma", "b": "beta"}


def test_an_old_definition_of_its_own_is_no_reason() -> None:
    old = vm("a", state=GuestState.SHUT_OFF)
    assert placed(answers(at("alpha", vm("a")), at("beta", old)))[0] == {"a": "beta"}


def test_labels_keep_guests_apart_and_on_hosts_that_have_them() -> None:
    apart = by("apart: [cluster]")
    told = answers(
        at("alpha", vm("a", labels={"cluster": "db"}), vm("c")),
        at("beta", vm("b", labels={"cluster": "db"})), at("gamma", vm("x"), vm("y")),
    )  # fmt: skip
    assert placed(told, policy=apart)[0] == {"a": "gamma", "c": "beta"}
    needy = by("needs: {rack: r7}", name="needy")
    going, left = placed(told, own={"a": needy})
    assert set(going) == {"c"}
    assert "rack=r7" in left["a"]


def test_a_host_in_maintenance_and_one_that_is_silent_get_nobody() -> None:
    told = answers(
        at("alpha", vm("a")), at("beta"), Look(host=replace(at("gamma").host), error="no route"),
        closed={"beta": "it is in maintenance (m-1, me@here)"},
    )  # fmt: skip
    going, left = placed(told)
    assert not going
    assert "maintenance" in left["a"]
    assert "gamma: the host does not answer" in left["a"]
    assert seen(told).silent == {"gamma": "no route"}


def test_who_is_to_be_suspended_stays_if_it_cannot_be_saved() -> None:
    kept = by("strategy: suspend-to-snapshot", name="kept")
    told = answers(
        at("alpha", vm("a"), vm("b", host_devices=("hostdev pci",)), vm("c", snapshots=1)),
        at("beta"),
    )
    own = dict.fromkeys("abc", kept)
    going, left = placed(told, own=own)
    assert not going
    assert left == {"b": "it uses a host device: hostdev pci"}
    assert EMPTY.to_stop(seen(told, own=own)) == {"a", "c"}


def test_one_that_arrives_is_counted_on_both_hosts_and_is_nobodys_twice() -> None:
    there = vm("a", state=GuestState.PAUSED, job="incoming migration")
    told = answers(at("alpha", vm("a", job=GuestJob.OUTGOING)), at("beta", there))
    found = seen(told)
    assert {(one.name, one.host, one.stays) for one in found.fleet.tenants} == {
        ("a", "alpha", ON_ITS_WAY), ("a on beta", "beta", ON_ITS_WAY),
    }  # fmt: skip
    assert set(found.known) == {"a"}


def test_a_plan_expects_what_was_forecast() -> None:
    told = answers(at("alpha", vm("a"), vm("b")), at("beta"))
    found = seen(told)
    fleet = EMPTY.fleet(found)
    made = plans.placed(fleet, EMPTY.asked(found), EvacuationTerms())
    check = plans.Checked(
        policy="mine", mode="precopy", total=Range(2.0, 4.0),
        sent=Range(100.0 * MIB, 300.0 * MIB), bandwidth=Range(50.0 * MIB, 100.0 * MIB),
    )  # fmt: skip
    checks = {(one.tenant.name, one.target): check for one in made.going}
    plan = plans.made(EMPTY, found, made, checks, EvacuationTerms())
    assert plan.total.low < plan.total.high
    # One after the other: the link is full with one. 1.5 s of setup, then 100 MiB/s or 50 MiB/s.
    assert plan.total.low == pytest.approx(1.5 + 2 * 1.0, abs=0.6)
    assert plan.total.high == pytest.approx(1.5 + 2 * 6.0, abs=0.6)
    assert [one["guest"] for one in plan.as_json()["moves"]] == ["a", "b"]
    loads = {one.host: (one.before, one.after) for one in plan.course.loads}
    assert loads["alpha"][1] == 0
    assert loads["beta"] == (0, loads["alpha"][0])


def test_where_preflight_says_no_nobody_is_placed() -> None:
    told = answers(at("alpha", vm("a")), at("beta"), at("gamma", vm("x")))
    found = seen(told)
    fleet = EMPTY.fleet(found)
    blocker = Finding(code="cpu", severity=Severity.BLOCKER, where="beta", text="no")
    no = plans.Checked(policy="mine", mode="", blockers=(blocker,))
    made = plans.placed(
        plans.without(fleet, {("a", "beta"): no}), EMPTY.asked(found), EvacuationTerms()
    )
    assert [one.target for one in made.going] == ["gamma"]
    nowhere = {("a", target): no for target in ("beta", "gamma")}
    made = plans.placed(plans.without(fleet, nowhere), EMPTY.asked(found), EvacuationTerms())
    assert [one.why for one in made.left] == ["beta: no; gamma: no"]


@pytest.mark.parametrize("state", [GuestState.CRASHED, GuestState.UNKNOWN])
def test_a_guest_of_which_something_is_left_keeps_its_host_from_being_empty(
    state: GuestState,
) -> None:
    going, left = placed(answers(at("alpha", vm("a", state=state)), at("beta")))
    assert not going
    assert list(left) == ["a on alpha"]


def test_a_guest_that_is_off_and_defined_twice_stays_and_it_is_said_why() -> None:
    off = vm("a", state=GuestState.SHUT_OFF)
    told = answers(at("alpha", off), at("beta", off), at("gamma"))
    assert placed(told) == ({}, {"a on alpha": "it is off, and also defined on another host"})


DEVICE = replace(vm("a").disks[0], kind="block", source="/dev/vg0/a")


@pytest.mark.parametrize(
    ("guest", "same", "why"),
    [
        (replace(vm("a"), disks=(DEVICE,)), {}, "its disk vda (block)"),
        (replace(vm("a"), snapshots=2), {"/srv/a.raw": True}, "snapshots; this guest has 2"),
        (vm("a"), {}, "alpha:/srv/a.raw (the guest is off, so vmckpt must find this file there"),
    ],
)
def test_a_guest_that_is_off_goes_only_where_its_disks_are_surely_seen(
    guest: Guest, same: dict[str, bool], why: str
) -> None:
    off = replace(guest, state=GuestState.SHUT_OFF)
    told = answers(at("alpha", off), at("beta"), same={("alpha", "beta"): same})
    going, left = placed(told)
    assert not going
    assert why in left["a"]
    on_network = replace(off, snapshots=0, disks=(replace(DEVICE, kind="network"),))
    assert placed(answers(at("alpha", on_network), at("beta")))[0] == {"a": "beta"}


def test_a_guest_that_is_not_defined_is_not_shut_down_for_a_while() -> None:
    told = answers(at("alpha", vm("a", persistent=False)), at("beta"))
    _, left = placed(told, policy=by("strategy: shutdown-and-return"))
    assert left["a"] == "it is transient: stopping it would delete its definition"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"saved": True}, "its memory is saved on its host"),
        ({"tpm": True}, "its TPM state"),
        ({"host_devices": ("hostdev pci",)}, "it uses a host device"),
        ({"snapshots": 2}, "with snapshots"),
    ],
)
def test_who_is_off_is_not_parted_from_what_belongs_to_it(more: dict[str, Any], why: str) -> None:
    going, left = placed(answers(at("alpha", vm("a", state=GuestState.SHUT_OFF, **more)), at("b")))
    assert not going
    assert why in left["a"]


def test_who_is_off_goes_only_where_its_nvram_is_seen() -> None:
    off = vm("a", state=GuestState.SHUT_OFF, nvram="/nv/a.fd")
    for sees, goes in ((True, {"a": "beta"}), (False, {})):
        same = {("alpha", "beta"): {"/srv/a.raw": True, "/nv/a.fd": sees}}
        assert placed(answers(at("alpha", off), at("beta"), same=same))[0] == goes


def test_a_clone_with_the_same_host_uuid_is_no_place_as_libvirt_refuses_it() -> None:
    clone = replace(at("beta"), facts=host_facts("alpha"))
    found = seen(answers(at("alpha", vm("a")), clone, at("gamma")))
    (tenant,) = found.fleet.tenants

    assert tenant.needs.never == {
        ("beta", "it has the same libvirt host UUID as the guest's host; run vmckpt doctor")
    }


def test_many_hosts_that_do_not_answer_are_one_short_reason() -> None:
    silent = [
        Look(host=at(f"h{number}").host, error=f"h{number}: no route to host")
        for number in range(200)
    ]
    going, left = placed(answers(at("alpha", vm("a")), *silent))
    assert not going
    assert left == {"a": "200 hosts: the host does not answer"}
