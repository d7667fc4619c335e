"""A function in a thread of its own."""

import threading

import pytest

from vmckpt.util import thread_call


def test_the_result_comes_from_another_thread() -> None:
    found = thread_call.start(threading.current_thread, name="other").result(10.0)
    assert (found.name, found.daemon) == ("other", True)
    assert found is not threading.current_thread()


def test_an_error_is_raised_where_the_result_is_wanted() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        thread_call.start(fail, name="failing").result(10.0)
