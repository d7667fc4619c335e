"""Commands that outlive who began them."""

import asyncio
import os
import sys
import time

import pytest

from vmckpt.app import subprocesses
from vmckpt.app.subprocesses import Processes
from vmckpt.model.events import Begun, Said


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses, "PROGRAM", ("sh", "-c"))


def ended(begun: Begun) -> Said:
    for _ in range(500):
        if begun.said().code is not None:
            break
        time.sleep(0.01)
    return begun.said()


async def test_what_only_looks_is_waited_for() -> None:
    line = "echo $SAID $VMCKPT_WIDTH; echo bad >&2; exit 3"
    said = await Processes({"SAID": "hello"}).ask([line], 77)
    assert said == Said(text="hello 77\nbad\n", code=3)


async def test_a_look_that_nobody_waits_for_is_ended() -> None:
    asking = asyncio.create_task(Processes({}).ask(["sleep 60; true"], 80))
    await asyncio.sleep(0.1)
    asking.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert time.monotonic() - began < 5


def test_what_acts_has_a_session_of_its_own_and_is_read_while_it_runs() -> None:
    begun = Processes({}).start(["echo one; sleep 0.3; echo two"], 80)
    assert os.getsid(begun.pid) == begun.pid
    for _ in range(200):
        if begun.said().text:
            break
        time.sleep(0.01)
    assert begun.said() == Said(text="one\n", code=None)
    assert ended(begun) == Said(text="one\ntwo\n", code=0)


def test_it_is_stopped_as_by_ctrl_c() -> None:
    begun = Processes({}).start(["trap 'echo clean; exit 130' INT; sleep 60 & wait"], 80)
    time.sleep(0.2)
    begun.stop()
    assert ended(begun) == Said(text="clean\n", code=130)
    begun.stop()  # it is over: nothing is signalled


def test_of_much_output_the_end_is_kept() -> None:
    code = "import sys; sys.stdout.write('x' * 3_000_000 + 'end')"
    begun = Processes({}).start([f'{sys.executable} -c "{code}"'], 80)
    text = ended(begun).text
    assert text.endswith("xend")
    assert len(text) == 1 << 20
