"""A guest's filters as a new agent finds them: no output gets out that a standby has not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replicas import Qemu, session
from vmckpt.agent.replica_primary import found_filters

CARDS = ("net0", "net1")
MARKS = ("holding", "collecting", "count")
ALL = tuple(f"vmckpt-{mark}-{card}" for card in CARDS for mark in MARKS)


class Found(Qemu):
    """A QEMU that has these filters; notes what is done to them."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        super().__init__()
        self._names, self.did = names, list[str]()
        for card in CARDS:
            (folder / f"count-{card}").write_bytes(bytes(24))

    def ask(self, command: str, **arguments: object) -> Any:
        assert command == "qom-list"
        return [{"name": name, "type": "child<x>"} for name in ("ram", *self._names)]

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        what = arguments.get("id") or str(arguments["path"]).rpartition("/")[2]
        self.did.append(f"{command} {what}")


def find(names: Sequence[str], folder: Path, *, alone: bool) -> tuple[bool, list[str]]:
    qemu = Found(names, folder)
    _, held = found_filters(session(cards=CARDS), folder, qemu, alone=alone)
    return held, qemu.did


def test_all_that_are_there_hold_on(tmp_path: Path) -> None:
    """Each is told so: the agent before may have died in the middle of a release."""
    held, did = find(ALL, tmp_path, alone=False)
    assert held
    assert did == [f"qom-set vmckpt-holding-{card}" for card in CARDS]


@pytest.mark.parametrize("missing", ALL)
def test_where_one_is_gone_the_others_keep_what_they_hold(tmp_path: Path, missing: str) -> None:
    """The lease must say first that the standby is worth nothing."""
    held, did = find([name for name in ALL if name != missing], tmp_path, alone=False)
    assert (held, did) == (False, [])


@pytest.mark.parametrize("names", [ALL, ALL[:2], ()])
def test_those_of_a_guest_that_went_on_alone_go(tmp_path: Path, names: Sequence[str]) -> None:
    held, did = find(names, tmp_path, alone=True)
    assert not held
    assert {one.removeprefix("object-del ") for one in did} == {*ALL}
