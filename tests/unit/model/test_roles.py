"""Which user may run which command: the table, and that every command has a row in it."""

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.paths import ROOT
from vmckpt.cli import app
from vmckpt.cli.commands import COMMANDS
from vmckpt.evacuation.task import Kind
from vmckpt.model.roles import NEEDS, ActingUser, Members, Role, Roles

ROLES = Roles(
    members={
        Role.VIEW: Members(groups=frozenset({"support"})),
        Role.MOVE: Members(users=frozenset({"bob"}), groups=frozenset({"operators"})),
        Role.DESTROY: Members(users=frozenset({"ann"})),
    }
)


def user(name: str, *groups: str, root: bool = False) -> ActingUser:
    return ActingUser(name=name, groups=frozenset(groups), root=root)


@pytest.mark.parametrize(
    ("acting", "role"),
    [
        (user("ann"), Role.DESTROY),
        (user("ann", "support"), Role.DESTROY),  # the highest role counts
        (user("bob"), Role.MOVE),
        (user("cleo", "staff", "operators"), Role.MOVE),
        (user("dan", "support"), Role.VIEW),
        (user("eve", "staff"), None),
        (user("operators"), None),  # the name of a group is no user
        (user("eve", "ann"), None),  # nor the other way round
        (user("root", root=True), Role.DESTROY),
        (user("root"), None),  # a user that only has this name
    ],
)
def test_a_user_has_the_highest_role_that_names_it(acting: ActingUser, role: Role | None) -> None:
    assert ROLES.of(acting) == role


def test_a_role_includes_the_lower_roles_only() -> None:
    bob = user("bob")
    assert [one for one in Role if ROLES.lacks(bob, one)] == [Role.DESTROY]
    assert [one for one in Role if ROLES.lacks(user("eve"), one)] == list(Role)
    assert [one for one in Role if ROLES.lacks(user("ann"), one)] == []


def test_a_role_without_members_is_nobodys() -> None:
    roles = Roles(members={Role.MOVE: Members(users=frozenset({"bob"}))})
    assert roles.of(user("ann")) is None
    assert roles.of(user("root", root=True)) is Role.DESTROY


def commands(path: str, command: Any) -> Iterator[str]:
    below = getattr(command, "commands", None)
    if not below:
        yield path
    for name, one in (below or {}).items():
        yield from commands(f"{path} {name}", one)


def test_every_command_is_in_the_table_and_nothing_else() -> None:
    found = {
        path for name, place in COMMANDS.items() for path in commands(name, app.loaded(name, place))
    }
    rows = {row.partition(" --")[0] for row in NEEDS}
    assert found == rows
    assert found <= NEEDS.keys()  # also without an option


def required() -> Iterator[tuple[str, str]]:
    """The commands that app and cli name when they ask for permission, with their place."""
    for path in sorted((ROOT / "vmckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(
                "permission.require"
            ):
                for one in ast.walk(node):
                    if isinstance(one, ast.Constant) and isinstance(one.value, str):
                        yield one.value, f"{path.name}:{node.lineno}"


def test_what_asks_for_permission_names_a_row_of_the_table() -> None:
    found = dict(required())
    assert len(found) > 25
    assert {name: where for name, where in found.items() if name not in NEEDS} == {}
    assert {str(one) for one in Kind} <= NEEDS.keys()  # app.evacuation names the kind


def test_each_command_that_needs_more_than_view_asks_for_it() -> None:
    # These ask with a computed name.
    computed = {
        "balance", "repopulate", "cancel", "pause", "postcopy", "set", "snapshot restore",
        "snapshot restore --as", "unprotect", "unprotect --lost-journal",
    }  # fmt: skip
    asked = {name for name, _ in required()} | computed
    assert {row for row, role in NEEDS.items() if role is not Role.VIEW} - asked == set()


def test_only_one_place_asks_the_inventory_whether_changes_are_allowed() -> None:
    found = [
        path.name
        for folder in ("app", "api", "cli")
        for path in (ROOT / "vmckpt" / folder).rglob("*.py")
        if ".may_act()" in path.read_text()
    ]
    assert found == ["permission.py"]
