"""What a capture switches on, and how it is put back: by a monitor that does as QEMU does."""

import json

import pytest

from tests.support.migrating import UNDO, Qemu
from vmckpt.capture import migration_settings
from vmckpt.capture.migration_settings import Undo
from vmckpt.errors import CannotCapture


@pytest.mark.parametrize(
    ("now", "want", "changes"),
    [
        ({"events": True, "a": False}, None, {}),
        ({"events": True, "a": False}, "a", {"a": False}),
        ({"events": True, "a": True}, "a", {}),
        ({"events": True, "a": False, "xbzrle": True}, "a", {"a": False, "xbzrle": True}),
        ({"events": False, "return-path": True}, None, {"return-path": True}),
    ],
)
def test_only_what_is_wanted_is_on(
    now: dict[str, bool], want: str | None, changes: dict[str, bool]
) -> None:
    assert migration_settings.changed(now, want) == changes


def test_the_facts_go_through_json() -> None:
    assert Undo.from_json(UNDO.to_json()) == UNDO


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"guest": 1}', UNDO.to_json().replace("134217728", '"x"'),
     UNDO.to_json().replace("false", "0"), json.dumps({**json.loads(UNDO.to_json()), "more": 1})],
)  # fmt: skip
def test_other_facts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Undo.from_json(text)


def test_the_facts_tell_what_will_change() -> None:
    qemu = Qemu()
    facts = migration_settings.settings_facts(
        qemu, want="background-snapshot", runs=None, folder=None
    )

    assert facts == UNDO
    migration_settings.apply(qemu, facts)
    assert qemu.capabilities["background-snapshot"]
    assert qemu.bandwidth == migration_settings.NO_LIMIT
    migration_settings.restore(qemu, facts)
    assert (qemu.capabilities, qemu.bandwidth) == (Qemu().capabilities, 134217728)


@pytest.mark.parametrize(
    ("qemu", "want", "message"),
    [
        (Qemu("active"), None, "is being migrated (active)"),
        (Qemu("postcopy-paused"), None, "is being migrated (postcopy-paused)"),
        (Qemu(), "mapped-ram", "does not support the migration capability mapped-ram"),
        (Qemu("completed", state="postmigrate"), None, "paused by an earlier migration"),
        (Qemu(state="shutdown"), None, "web1 on alpha is in state shutdown"),
    ],
)
def test_a_guest_that_cannot_be_captured_is_refused(
    qemu: Qemu, want: str | None, message: str
) -> None:
    with pytest.raises(CannotCapture) as caught:
        migration_settings.settings_facts(qemu, want=want, runs=None, folder=None)

    assert message in caught.value.message
    assert qemu.told == []


@pytest.mark.parametrize(
    ("qemu", "told", "state"),
    [
        (Qemu("none"), [], "running"),
        (Qemu("active", "cancelling", "cancelled"), ["migrate_cancel"], "running"),
        (Qemu("active", "completed"), ["migrate_cancel"], "running"),
        (Qemu("completed", state="postmigrate"), [], "running"),
        (Qemu("failed", state="paused"), [], "running"),
        (Qemu("failed", state="paused", paused_by=True), [], "paused"),
        (Qemu("completed", state="shutdown"), [], "shutdown"),
    ],
)
def test_everything_is_put_back(qemu: Qemu, told: list[str], state: str) -> None:
    qemu.capabilities["background-snapshot"] = True
    qemu.bandwidth = 7
    went_on = ["cont"] if state == "running" and qemu.state != "running" else []
    migration_settings.break_off(qemu, UNDO)

    changes = ["migrate-set-capabilities", "migrate-set-parameters", "closefd"]
    assert qemu.told == told + changes + went_on
    assert qemu.state == state
    assert not qemu.capabilities["background-snapshot"]
    assert qemu.bandwidth == 134217728


@pytest.mark.parametrize(
    ("state", "at_once", "after"),
    [("paused", False, "paused"), ("running", False, "running"), ("running", True, "paused")],
)
def test_a_guest_that_was_to_stand_still_does(state: str, at_once: bool, after: str) -> None:
    facts = Undo(**{**json.loads(UNDO.to_json()), "runs": False})
    qemu = Qemu("completed", state=state)
    migration_settings.break_off(qemu, facts, at_once=at_once)

    assert qemu.state == after
