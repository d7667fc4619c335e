"""A guest's filters as a new agent finds them: no output gets out that a standby has not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.replicas import Qemu, session
from vmckpt.agent.replication.primary import found_filters

CARDS = ("net0", "net1")
KINDS = ("sink", "holding", "collecting", "count")
ALL = tuple(f"vmckpt-{kind}-{card}" for card in CARDS for kind in KINDS)


class Found(Qemu):
    """A QEMU that has these filters; notes what is done to them, in order."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        super().__init__()
        self.names, self.did = list(names), list[str]()
        for card in CARDS:
            (folder / f"count-{card}").write_bytes(bytes(24))

    def ask(self, command: str, **arguments: object) -> Any:
        if command == "query-chardev":
            return []
        assert command == "qom-list"
        return [{"name": name, "type": "child<x>"} for name in ("ram", *self.names)]

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        match command:
            case "object-add":
                self.names.append(arguments["id"])
                self.did.append(f"add {arguments['id']} {arguments['status']}")
            case "object-del":
                self.names.remove(arguments["id"])
                self.did.append(f"del {arguments['id']}")
            case "qom-set":
                name = arguments["path"].removeprefix("/objects/")
                self.did.append(f"set {name} {arguments['value']}")
            case _:
                raise AssertionError(command)

    def described(self) -> str:
        return "<domain/>"


def find(names: Sequence[str], folder: Path, *, alone: bool) -> tuple[bool, Found]:
    qemu = Found(names, folder)
    _, held = found_filters(session(cards=CARDS), folder, qemu, alone=alone)
    return held, qemu


def test_all_that_are_there_hold_on(tmp_path: Path) -> None:
    """Each is told so: the agent before may have died in the middle of a release."""
    held, qemu = find(ALL, tmp_path, alone=False)
    assert held
    first = [f"set vmckpt-{kind}-{card} on" for kind in ("sink", "holding") for card in CARDS]
    assert qemu.did[:4] == first
    assert not [one for one in qemu.did if one.endswith(" off")]


@pytest.mark.parametrize("missing", ALL)
def test_where_one_is_gone_the_others_keep_what_they_hold(tmp_path: Path, missing: str) -> None:
    """The lease must say first that the standby is worth nothing. A sink is not needed."""
    held, qemu = find([name for name in ALL if name != missing], tmp_path, alone=False)
    assert held == missing.startswith("vmckpt-sink")
    assert not [one for one in qemu.did if one.endswith(" off")]
    for number, one in enumerate(qemu.did):
        if one.startswith("del "):  # what it holds is in the one that replaced it
            _, mark, card = one.split("-")
            assert f"add vmckpt-{mark}1-{card} on" in qemu.did[:number]


@pytest.mark.parametrize("names", [ALL, ALL[:2], ()])
def test_those_of_a_guest_that_went_on_alone_go(tmp_path: Path, names: Sequence[str]) -> None:
    held, qemu = find(names, tmp_path, alone=True)
    assert not held
    assert not qemu.names
    assert {one.removeprefix("del ") for one in qemu.did} == {*names}
