"""Which way to find changed pages a host gets, and what is remembered of a try."""

from pathlib import Path

import pytest

from vmckpt.replication.dirty_pages.select import (
    CHECKPOINTS,
    Finder,
    Tried,
    choose,
    decide,
    recall,
    remember,
)
from vmckpt.replication.dirty_pages.select import tryout as really_try

GOOD = Tried(checkpoints=CHECKPOINTS)


class Host:
    """One whose tries are counted."""

    def __init__(self, folder: Path, came_of_it: Tried = GOOD) -> None:
        self.folder, self.came_of_it, self.tries = folder, came_of_it, 0

    def chooses(
        self, *, qemu: str = "7.2.22", accelerator: str = "kvm", guarded: bool = True
    ) -> tuple[Finder, str]:
        found = choose(
            self.folder, qemu=qemu, accelerator=accelerator, guarded=guarded, trying=self._tried
        )
        return found.finder, found.why

    def _tried(self) -> Tried:
        self.tries += 1
        return self.came_of_it


def test_what_was_right_every_time_is_used_and_tried_once(tmp_path: Path) -> None:
    host = Host(tmp_path)
    first = host.chooses()

    assert first[0] is Finder.DIRTY_LOG
    assert f"correct {CHECKPOINTS} times" in first[1]
    assert host.chooses() == first
    assert host.tries == 1


@pytest.mark.parametrize(
    ("came_of_it", "why"),
    [
        (Tried(checkpoints=0, broke="its migration is completed"), "its migration is completed"),
        (Tried(checkpoints=3, broke="timed out"), "timed out"),
        (Tried(checkpoints=CHECKPOINTS, broke="it does not run"), "it does not run"),
        (Tried(checkpoints=CHECKPOINTS - 1), f"correct only {CHECKPOINTS - 1} times"),
    ],
)
def test_what_failed_once_is_not_used_and_the_reason_is_told(
    tmp_path: Path, came_of_it: Tried, why: str
) -> None:
    host = Host(tmp_path, came_of_it)
    finder, told = host.chooses()

    assert finder is Finder.COMPARE
    assert why in told
    assert host.chooses() == (finder, told)
    assert host.tries == 1


def test_under_tcg_nothing_is_tried(tmp_path: Path) -> None:
    host = Host(tmp_path)
    finder, why = host.chooses(accelerator="tcg")

    assert (finder, host.tries) == (Finder.COMPARE, 0)
    assert "tcg" in why


def test_a_guest_that_nothing_keeps_from_being_migrated_is_compared(tmp_path: Path) -> None:
    host = Host(tmp_path)
    finder, why = host.chooses(guarded=False)

    assert (finder, host.tries) == (Finder.COMPARE, 0)
    assert "nothing prevents saving or migrating" in why
    assert host.chooses()[0] is Finder.DIRTY_LOG


def test_another_qemu_is_tried_by_itself(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.chooses()
    host.came_of_it = Tried(checkpoints=0, broke="no COLO")

    assert host.chooses(qemu="10.0.2")[0] is Finder.COMPARE
    assert host.chooses()[0] is Finder.DIRTY_LOG
    assert host.tries == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"7.2.22 kvm": 1}',
     '{"7.2.22 kvm": {"checkpoints": "20"}}', "[" * 9999,
     '{"7.2.22 kvm": {"checkpoints": 20}}'],
)  # fmt: skip
def test_a_memory_that_makes_no_sense_is_tried_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "finder.json").write_text(text)
    host = Host(tmp_path)

    assert host.chooses()[0] is Finder.DIRTY_LOG
    assert host.tries == 1
    assert recall(tmp_path, "7.2.22", "kvm") == GOOD


def test_what_is_remembered_leaves_no_other_file(tmp_path: Path) -> None:
    remember(tmp_path, "7.2.22", "kvm", GOOD)

    assert [path.name for path in tmp_path.iterdir()] == ["finder.json"]


def test_without_a_try_nothing_is_decided_where_it_could_work() -> None:
    assert decide("kvm", guarded=True, tried=None) is None


def test_a_host_without_that_qemu_or_accelerator_says_so() -> None:
    assert "nonesuch" in really_try(qemu="/nonesuch/qemu").broke
    assert really_try(accelerator="nonesuch").broke != ""
