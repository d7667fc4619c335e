"""A process that is held is never another one, and its end is known at once."""

import subprocess
import time
from collections.abc import Iterator

import pytest

from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess


@pytest.fixture
def sleeping() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_it_lives_until_it_has_ended(sleeping: "subprocess.Popen[bytes]") -> None:
    with HeldProcess(sleeping.pid) as process:
        assert process.lives()
        began = time.monotonic()
        assert not process.ended(0.1)
        assert time.monotonic() - began >= 0.1
        sleeping.terminate()
        assert process.ended(5.0)
        assert not process.lives()


def test_it_is_ended_and_that_may_be_repeated(sleeping: "subprocess.Popen[bytes]") -> None:
    with HeldProcess(sleeping.pid) as process:
        assert process.end(5.0)
        assert sleeping.wait() == -9
        process.kill()
        assert process.end(0.0)


def test_a_process_that_is_gone_cannot_be_held(sleeping: "subprocess.Popen[bytes]") -> None:
    sleeping.kill()
    sleeping.wait()
    with pytest.raises(ProcessLookupError):
        HeldProcess(sleeping.pid)


def test_it_is_let_go_once(sleeping: "subprocess.Popen[bytes]") -> None:
    process = HeldProcess(sleeping.pid)
    process.close()
    process.close()
    assert sleeping.poll() is None
