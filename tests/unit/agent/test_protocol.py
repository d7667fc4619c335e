"""What an agent and its controller say to each other."""

import io
import json
import threading
from typing import IO, Any, cast

import pytest

from vmckpt.agent.protocol import ControllerChannel, error_as_json, error_from_json
from vmckpt.capture.memory.undo_process import left_behind
from vmckpt.errors import BadInput, Cancelled, GuestLocked, HypervisorError, VmckptError
from vmckpt.model.recovery import Phase
from vmckpt.units import Seconds


def test_a_controller_that_is_silent_is_not_waited_for() -> None:
    never = threading.Event()

    class Silent:
        def readline(self) -> str:
            return "{}\n"

        def __iter__(self) -> Any:
            never.wait(30)
            return iter(())

    channel = ControllerChannel(cast("IO[str]", Silent()), io.StringIO())
    channel.order()
    with pytest.raises(Cancelled, match=r"did not answer within 0\.05 s"):
        channel.request("cut", phase=Phase.STOPPED, limit=Seconds(0.05))
    never.set()


def opened(*lines: str) -> tuple[ControllerChannel, io.StringIO]:
    """An agent's end that hears these lines after its order, and what it says."""
    said = io.StringIO()
    channel = ControllerChannel(io.StringIO("".join(f"{one}\n" for one in lines)), said)
    return channel, said


def test_an_order_comes_first_and_then_answers() -> None:
    channel, said = opened('{"do": "create"}', '{"answer": 7}', '{"refused": "no"}')
    assert channel.order() == {"do": "create"}
    assert channel.request("sign", manifest="m") == 7
    with pytest.raises(VmckptError, match="no"):
        channel.request("sign", manifest="n")
    assert [json.loads(one) for one in said.getvalue().splitlines()] == [
        {"ask": "sign", "about": {"manifest": "m"}},
        {"ask": "sign", "about": {"manifest": "n"}},
    ]
    with pytest.raises(EOFError):
        opened()[0].order()


@pytest.mark.parametrize("last", ['{"stop": true}', "nonsense", None])
def test_whoever_is_told_to_stop_or_has_lost_its_controller_stops(last: str | None) -> None:
    channel, _ = opened("{}", *([] if last is None else [last]))
    channel.order()
    assert channel.stop.wait(5.0)
    for _ in range(2):
        with pytest.raises(Cancelled, match="the controller is gone"):
            channel.request("sign")


def test_progress_is_told_no_more_often_than_somebody_can_read() -> None:
    channel, said = opened("{}")
    for done in range(1000):
        channel.progress(done=done)
    told = said.getvalue().splitlines()
    assert json.loads(told[0]) == {"progress": {"done": 0}}
    assert len(told) < 100


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadInput("no", hint="do so"), "BadInput"),
        (HypervisorError("no", host="alpha", hint="do so"), "HypervisorError"),
        (GuestLocked("no", hint="do so"), "GuestBusy"),  # as agents of all versions read it
    ],
)
def test_an_error_is_the_same_at_the_other_end(error: VmckptError, kind: str) -> None:
    told = json.loads(json.dumps(error_as_json(error)))
    assert told["kind"] == kind
    found = error_from_json(told, "alpha")
    assert (type(found), found.message, found.hint) == (type(error), "no", "do so")
    assert found.undone
    assert found.host == "alpha"


def test_what_an_error_hides_was_not_put_back_either() -> None:
    def fail() -> None:
        try:
            raise left_behind(None)
        except VmckptError:
            raise BadInput("another one") from None

    with pytest.raises(BadInput) as caught:
        fail()
    told = error_as_json(caught.value)
    assert not told["undone"]
    assert not error_from_json(told, "alpha").undone


@pytest.mark.parametrize("kind", ["Surprise", "Path", "annotations", None])
def test_an_error_of_a_kind_that_is_not_known_is_one_of_ours(kind: str | None) -> None:
    found = error_from_json({"kind": kind, "message": "no"}, "alpha")
    assert (type(found), str(found)) == (VmckptError, "no")
