"""What streams carry, from samples of migrations that are on their way."""

from tests.support.builders import sample
from vmckpt.evacuation.bandwidth import Streams
from vmckpt.model.migration import JobPhase


def test_a_stream_tells_once_it_is_old_enough_and_forgets_when_it_has_ended() -> None:
    streams = Streams()
    streams.heard("a", sample(0.0, iteration=0))  # nothing is sent yet
    streams.heard("a", sample(9.0, transferred=1000))
    streams.heard("a", sample(9.9, transferred=9000))
    assert streams.carry() == {}
    streams.heard("a", sample(11.0, iteration=2, transferred=5000))
    assert streams.carry() == {"a": 2000}
    # A guest that waits for its pages or stands still says nothing of the stream.
    streams.heard("a", sample(30.0, iteration=2, transferred=6000, phase=JobPhase.POST_COPY))
    assert streams.carry() == {"a": 2000}
    streams.ended("a")
    assert streams.carry() == {}


def test_one_that_sends_nothing_says_nothing() -> None:
    streams = Streams()
    for at in (0.0, 5.0):
        streams.heard("a", sample(at, transferred=1000))
    assert streams.carry() == {}
