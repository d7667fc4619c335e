"""What users may do with an inventory that has roles, and the audit trail of refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt import api, inventory
from vmckpt.app import controller, migration, permission
from vmckpt.cli import app
from vmckpt.errors import InventoryError, NotPermitted, ReadOnly
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs, location
from vmckpt.journal.records import NewOperation, RequestKind
from vmckpt.journal.store import Journal
from vmckpt.model.roles import ActingUser
from vmckpt.util import acting_user

HOSTS = "hosts:\n  alpha: {uri: 'test:///default'}\n"
ROLES = """\
roles:
  view: {groups: [support]}
  move: {users: [bob]}
  destroy: {users: [ann]}
"""
Become = Callable[..., None]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An inventory with roles, and a journal of our own."""
    found = tmp_path / "hosts.yaml"
    found.write_text(HOSTS + ROLES)
    monkeypatch.setenv(inventory.VARIABLE, str(found))
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    return found


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    def become_(name: str, *groups: str) -> None:
        user = ActingUser(name=name, groups=frozenset(groups))
        monkeypatch.setattr(acting_user, "acting_user", lambda: user)

    return become_


def known(path: Path) -> Inventory:
    return inventory.load(path)


def refusals() -> list[tuple[str | None, str | None, str | None]]:
    with Journal() as journal:
        deeds = [one.fact.deed for one in journal.audit()]
    return [(one.step, one.guest, one.outcome) for one in deeds if one.what == "refused"]


def test_a_refusal_names_the_user_the_role_and_the_file_and_is_recorded(
    path: Path, become: Become
) -> None:
    become("bob")
    permission.require(known(path), "migrate")
    with pytest.raises(NotPermitted) as caught:
        permission.require(known(path), "failover", guest="web1\udcff")
    assert str(caught.value) == (
        "user bob may not run vmckpt failover: it needs the role destroy; nothing was changed; ask"
        f" an administrator to add the user to roles: destroy in {path}"
    )
    assert refusals() == [("vmckpt failover", "web1?", "bob lacks the role destroy")]
    with Journal() as journal:
        assert journal.verify_audit().broken is None


def test_without_roles_everything_is_allowed_and_nobody_is_looked_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> ActingUser:
        raise AssertionError

    monkeypatch.setattr(acting_user, "acting_user", never)
    free = replace(known(path), roles=None)
    permission.require(free, "failover")
    permission.require_view(free)


def test_read_only_mode_is_checked_first(path: Path, become: Become) -> None:
    become("eve")
    closed = replace(known(path), read_only=True)
    with pytest.raises(ReadOnly):
        permission.require(closed, "migrate")
    with pytest.raises(NotPermitted, match="may not run vmckpt snapshot open"):
        permission.require_role(closed, "snapshot open")


def test_a_refusal_that_cannot_be_recorded_is_still_a_refusal(
    path: Path, become: Become, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become("eve")
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(NotPermitted, match=r"the refusal was not recorded \(journal .*\); ask"):
        permission.require(known(path), "migrate")
    monkeypatch.setenv(location.VARIABLE, location.NONE)
    with pytest.raises(NotPermitted, match="nothing was changed; ask"):
        permission.require(known(path), "migrate")
    monkeypatch.setenv(location.VARIABLE, str(tmp_path / "journal.db"))
    Journal(tmp_path / "journal.db").close()
    monkeypatch.setenv(inventory.READ_ONLY, "1")
    with pytest.raises(NotPermitted, match="was not recorded"):
        permission.require_role(known(path), "snapshot open")


def test_a_user_without_a_role_cannot_use_the_inventory(path: Path, become: Become) -> None:
    become("dan", "support")
    assert controller.load_inventory().path == path
    become("eve")
    with pytest.raises(NotPermitted, match="user eve may not run vmckpt with this inventory"):
        controller.load_inventory()
    with pytest.raises(NotPermitted):  # programs obey the same roles
        api.Client()


def test_a_request_to_a_job_needs_the_role_even_though_it_needs_no_inventory(
    become: Become, path: Path
) -> None:
    with jobs.open_journal() as journal:
        job = journal.begin(NewOperation(kind="evacuate", guest="alpha", source="alpha"))
    become("dan", "support")
    with pytest.raises(NotPermitted, match="vmckpt cancel: it needs the role move"):
        migration.control(controller.load_inventory, job, RequestKind.CANCEL, {}, print)
    become("eve")
    with pytest.raises(NotPermitted):
        migration.control(controller.load_inventory, job, RequestKind.CANCEL, {}, print)
    with jobs.open_journal() as journal:
        assert journal.requests(job) == []

    def none() -> Inventory:
        raise InventoryError("no inventory")

    permission.require_if_known(none, "cancel")


def test_a_command_that_is_no_job_is_recorded_with_its_names(path: Path) -> None:
    free = replace(known(path), roles=None)
    permission.require(free, "snapshot delete", names=["a", "b\udcff"])
    permission.require(free, "migrate")  # its job is recorded
    permission.require_role(free, "snapshot open", names=["c"])
    with Journal() as journal:
        deeds = [(one.fact.deed.what, one.fact.deed.step) for one in journal.audit()]
    assert deeds == [
        ("allowed", "vmckpt snapshot delete a b?"), ("allowed", "vmckpt snapshot open c"),
    ]  # fmt: skip
    permission.require_role(replace(free, read_only=True), "snapshot open", names=["c"])
    with Journal() as journal:
        assert len(journal.audit()) == 2


def test_a_command_that_frees_space_runs_without_a_journal(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("in the way")
    permission.require(replace(known(path), roles=None), "snapshot gc")
    (told,) = caplog.messages
    assert told.startswith("vmckpt snapshot gc is not in the audit trail: journal ")


@pytest.mark.parametrize(
    ("user", "words", "code"),
    [
        ("dan", ["maintenance", "enter", "alpha"], 7),
        ("bob", ["maintenance", "enter", "alpha"], 0),
        ("bob", ["snapshot", "delete", "x", "--yes"], 7),
        ("bob", ["snapshot", "keys", "remove", "x"], 7),
        ("bob", ["recover"], 7),
        ("eve", ["hosts"], 7),
        ("ann", ["maintenance", "enter", "alpha"], 0),
    ],
)
def test_commands_obey_the_roles(
    become: Become, user: str, words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    become(user, *(["support"] if user == "dan" else []))
    assert app.run(words) == code
    if code:
        assert capsys.readouterr().err.startswith(f"error: user {user} may not run vmckpt ")
        assert len(refusals()) == 1
    else:
        assert refusals() == []
