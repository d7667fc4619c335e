"""Each cell of docs/locking.md: something is under way, and somebody asks for something else."""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.lab.bench import Bench
from tests.lab.locking_scenes import Scene
from tests.lab.locking_table import CELLS
from tests.lab.locking_under import BEGIN, FINISH
from tests.lab.locking_words import Answer, Asked, Cell, Under
from tests.support import tables


class Stage:
    """One scene at a time: what is under way serves all the cells of its row."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._scene: Scene | None = None

    def scene(self, under: Under) -> Scene:
        if self._scene is None or self._scene.under is not under:
            self.clear()
            self._scene = Scene(self._bench, under, BEGIN[under], FINISH[under])
        return self._scene

    def clear(self) -> None:
        if self._scene is not None:
            self._scene.clear()
        self._scene = None


@pytest.fixture(scope="module")
def stage(session_lab: Bench) -> Iterator[Stage]:
    made = Stage(session_lab)
    yield made
    made.clear()


WAITED_FOR = (Asked.REBOOT, Asked.SHUTDOWN, Asked.UNDEFINE)
"""A minute each: the lab's guests do not hear their power button."""


def tried() -> Iterator[object]:
    """All cells, row by row, and after each row what was under way is let go on to its end."""
    for row, under in enumerate(Under):
        cells = [cell for cell in CELLS if cell.under is under]
        for cell in cells:
            marks = tables.marks(row, list(Asked).index(cell.asked), quick=cell.quick)
            if cell.asked in WAITED_FOR and not cell.quick:
                marks = (pytest.mark.campaign,)
            yield pytest.param(under, cell, id=str(cell), marks=marks)
        marks = () if any(cell.quick for cell in cells) else (pytest.mark.long,)
        yield pytest.param(
            under, None, id=f"{under.name}-ends".lower().replace("_", "-"), marks=marks
        )


@pytest.mark.parametrize(("under", "cell"), list(tried()))
def test_what_is_asked_for_meanwhile(stage: Stage, under: Under, cell: Cell | None) -> None:
    scene = stage.scene(under)
    scene.begin()
    if cell is None:
        scene.finish()
        return
    if cell.answer is Answer.WAITS:
        waiting = [c.asked for c in CELLS if c.under is under and c.answer is Answer.WAITS]
        done = scene.ask_together(waiting)[cell.asked]
    else:
        scene.spent = not cell.then.goes_on or cell.then.stands
        done = scene.ask(cell.asked)

    assert done.code in ((0, 1) if cell.code is None else (cell.code,)), done
    assert cell.says in done.out + done.err
    assert "Traceback" not in done.err
    scene.came_of(cell.then)


@pytest.mark.long
def test_what_waits_is_done_as_soon_as_the_migration_has_ended(stage: Stage) -> None:
    scene = stage.scene(Under.PRECOPY)
    scene.begin()
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(scene.ask(Asked.SETVCPUS).code))
    waiting.start()
    time.sleep(2.0)  # no answer comes
    assert answers == []
    scene.finish()
    waiting.join()

    assert answers == [0]
