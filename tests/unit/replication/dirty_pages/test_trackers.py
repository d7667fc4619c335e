import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory import soft_dirty
from vmckpt.capture.memory.soft_dirty import SoftDirty
from vmckpt.capture.memory.write_tracking import WriteTracking
from vmckpt.model.epoch_cost import Finder
from vmckpt.replication.dirty_pages import trackers


@pytest.mark.parametrize(
    ("finder", "kind"), [(Finder.WRITE_TRACKING, WriteTracking), (Finder.SOFT_DIRTY, SoftDirty)]
)
def test_each_method_has_its_tracker(
    finder: Finder, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soft_dirty, "is_supported", lambda: True)
    with WrittenProcess() as process, trackers.track(finder, process.held, [process.range]) as made:
        assert type(made) is kind
        assert [one.tolist() for one in made.collect_all()] == [[[0, 256]]]
    assert finder in trackers.BEST_FIRST
