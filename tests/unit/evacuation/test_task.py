"""Who is to leave which host, and where to."""

from dataclasses import replace

import pytest

from tests.support.sights import EMPTY, answers, at, by, placed, seen, vm
from vmckpt.errors import BadInput
from vmckpt.evacuation.plan.inventory import Protected
from vmckpt.evacuation.task import Kind, Task
from vmckpt.model.guest import GuestState
from vmckpt.units import GIB, Bytes


def test_who_is_to_come_back_and_cannot_as_he_is_is_named() -> None:
    crashed, off = vm("a", state=GuestState.CRASHED), vm("b", state=GuestState.SHUT_OFF)
    there = vm("c", state=GuestState.CRASHED)
    told = answers(at("alpha", off, there), at("beta", crashed, off, vm("d")))
    goes = frozenset((one.uuid, "alpha") for one in (crashed, off, there, vm("d")))
    back = Task(kind=Kind.REPOPULATE, host="alpha", goes=goes)
    left = {one.tenant.name: one.why for one in back.unseen(seen(told))}
    assert left == {
        "a on beta": "it has crashed, and its state is preserved on its host",
        "b on beta": "it is off, and also defined on another host",
    }
    assert placed(told, back) == ({"d": "alpha"}, {})


def test_only_to_hosts_that_were_named() -> None:
    told = answers(at("alpha", vm("a")), at("beta", vm("b")), at("gamma"))
    assert placed(told, replace(EMPTY, to=frozenset({"beta"})))[0] == {"a": "beta"}


def test_a_policy_leaves_a_guest_or_shuts_it_down() -> None:
    told = answers(at("alpha", vm("a"), vm("b"), vm("c")), at("beta"))
    own = {
        "a": by("strategy: leave", name="fixed"),
        "b": by("strategy: shutdown-and-return", name="lab"),
    }
    going, left = placed(told, own=own)
    assert going == {"c": "beta"}
    assert left == {"a": "its policy fixed has strategy: leave"}
    assert EMPTY.to_stop(seen(told, own=own)) == {"b"}


def test_who_is_to_be_shut_down_and_has_a_job_is_left_and_named() -> None:
    told = answers(at("alpha", vm("a", job="backup")), at("beta"))
    own = {"a": by("strategy: shutdown-and-return", name="lab")}
    assert placed(told, own=own) == ({}, {"a": "it has a job in progress: backup"})


def test_guests_come_back_to_where_they_were_and_to_no_other_host() -> None:
    told = answers(at("alpha"), at("beta", vm("a"), vm("b")), at("gamma"))
    back = Task(kind=Kind.REPOPULATE, host="alpha", goes=frozenset({("u-a", "alpha")}))
    assert placed(told, back) == ({"a": "alpha"}, {})
    here = answers(at("alpha", vm("a")), at("beta"))
    assert placed(here, back) == ({}, {})


def test_an_order_is_the_same_after_the_journal() -> None:
    order = Task(
        kind=Kind.REPOPULATE, host="alpha", to=frozenset({"beta"}),
        goes=frozenset({("u-a", "alpha")}), start=frozenset({"u-b"}), policy="mine",
    )  # fmt: skip
    assert Task.from_json(order.as_json()) == order
    assert Task.from_json(EMPTY.as_json()) == EMPTY
    with pytest.raises(KeyError):
        Task.from_json({"kind": "evacuate"})


def test_who_is_off_as_his_policy_would_have_him_is_not_moved() -> None:
    told = answers(at("alpha", vm("a", state=GuestState.SHUT_OFF, saved=True)), at("beta"))
    for strategy in ("suspend-to-snapshot", "shutdown-and-return"):
        own = {"a": by(f"strategy: {strategy}", name="kept")}
        assert placed(told, own=own) == ({}, {})
        assert EMPTY.to_stop(seen(told, own=own)) == frozenset()


def test_a_protected_guest_goes_to_its_standby_only_to_empty_its_host() -> None:
    a = vm("a", memory=Bytes(6 * GIB))
    standby = replace(a, state=GuestState.STANDBY)
    who = {"u-a": Protected(primary="alpha", backup="beta", job="p-1")}
    told = answers(at("alpha", a, vm("b")), at("beta", standby), at("gamma"), protected=who)
    for task in (Task(kind=Kind.BALANCE), Task(kind=Kind.EVACUATE, host="gamma")):
        (seated,) = (one for one in task.fleet(seen(told)).tenants if one.name == "a")
        assert "would lose its standby" in str(seated.stays)
    only = replace(EMPTY, to=frozenset({"gamma"}))
    assert placed(told, only)[1]["a"].count("pinned") == 0


def test_a_host_does_not_take_its_own_guests() -> None:
    with pytest.raises(BadInput, match="alpha cannot be both evacuated and a target"):
        Task(kind=Kind.EVACUATE, host="alpha", to=frozenset({"alpha", "beta"}))
