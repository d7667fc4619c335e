"""File systems held still: they go on whatever happens, and it is said how it went."""

import threading
import time

import pytest

from vmckpt.capture.fs_freeze import FsFreeze, FsFreezeUndo
from vmckpt.errors import HypervisorError
from vmckpt.model.finding import Severity
from vmckpt.units import Seconds


class FakeAgent:
    """Has file systems that can be held still, and troubles on request."""

    def __init__(self, *, there: bool = True, freezes: bool = True, deaf_to_thaws: int = 0) -> None:
        self.is_there, self.freezes, self.deaf = there, freezes, deaf_to_thaws
        self.still = False
        self.heard: list[str] = []
        self.let_go = threading.Event()

    def there(self) -> bool:
        return self.is_there

    def frozen(self) -> bool:
        return self.still

    def freeze(self, *, limit: Seconds) -> int:
        self.heard.append("freeze")
        self.still = True  # also where the answer is lost
        if not self.freezes:
            raise HypervisorError("alpha: no answer in time", host="alpha")
        return 1

    def thaw(self) -> int:
        self.heard.append("thaw")
        if self.deaf:
            self.deaf -= 1
            raise HypervisorError("alpha: no answer in time", host="alpha")
        self.still = False
        self.let_go.set()
        return 1


def quiet(
    agent: FakeAgent, limit: float = 30.0, notes: list[FsFreezeUndo] | None = None
) -> FsFreeze:
    noted = [] if notes is None else notes
    return FsFreeze(
        agent, guest="u-1", limit=Seconds(limit), note=noted.append, between=Seconds(0.001)
    )


def test_they_stand_still_in_between_and_go_on() -> None:
    agent, notes = FakeAgent(), list[FsFreezeUndo]()
    with quiet(agent, notes=notes) as held:
        assert (agent.still, held.held) == (True, True)
        assert held.release()
        assert not agent.still

    assert agent.heard == ["freeze", "thaw"]
    assert held.finding("web1") is None
    assert FsFreezeUndo.from_json(notes[0].to_json()) == FsFreezeUndo(guest="u-1")


def test_they_go_on_when_the_capture_fails() -> None:
    agent = FakeAgent()
    with pytest.raises(KeyboardInterrupt), quiet(agent):
        raise KeyboardInterrupt

    assert not agent.still


def test_without_an_agent_nothing_is_done_or_noted() -> None:
    agent, notes = FakeAgent(there=False), list[FsFreezeUndo]()
    with quiet(agent, notes=notes) as held:
        assert not held.held
        assert not held.release()

    finding = held.finding("web1")
    assert (agent.heard, notes) == ([], [])
    assert finding is not None
    assert (finding.code, finding.severity) == ("no-agent", Severity.INFO)


def test_a_freeze_that_failed_is_undone_at_once() -> None:
    agent = FakeAgent(freezes=False)
    with quiet(agent) as held:
        assert (agent.still, held.held) == (False, False)

    finding = held.finding("web1")
    assert finding is not None
    assert (finding.code, finding.severity) == ("not-frozen", Severity.WARNING)
    assert "no answer in time" in finding.text


def test_nobody_stands_still_longer_than_the_limit() -> None:
    agent = FakeAgent()
    with quiet(agent, limit=0.05) as held:
        assert agent.let_go.wait(5.0)
        time.sleep(0.01)
        assert not held.held
        assert not held.release()

    finding = held.finding("web1")
    assert finding is not None
    assert finding.code == "thawed-early"
    assert "limit of 0.05 s" in finding.text
    assert [t for t in threading.enumerate() if t.name == "thaw"] == []


def test_an_agent_that_is_deaf_for_a_while_is_asked_again() -> None:
    agent = FakeAgent(deaf_to_thaws=3)
    with quiet(agent) as held:
        pass

    assert agent.heard == ["freeze", *["thaw"] * 4]
    assert held.finding("web1") is None


def test_an_agent_that_stays_deaf_is_told_of_with_the_mend() -> None:
    agent = FakeAgent(deaf_to_thaws=99)
    with quiet(agent) as held:
        pass

    finding = held.finding("web1")
    assert finding is not None
    assert finding.code == "still-frozen"
    assert finding.text == (
        "its file systems may still be frozen: the guest agent did not thaw them; run virsh"
        " domfsthaw u-1"
    )


def test_a_freeze_that_failed_and_is_not_undone_is_told_with_both_reasons() -> None:
    with quiet(FakeAgent(freezes=False, deaf_to_thaws=99)) as held:
        pass

    finding = held.finding("web1")
    assert finding is not None
    assert finding.text.startswith("its file systems may still be frozen: freezing failed: ")


def test_what_cannot_be_noted_is_not_begun() -> None:
    agent = FakeAgent()

    def refuse(_: FsFreezeUndo) -> None:
        raise HypervisorError("the journal is full", host="here")

    with (
        pytest.raises(HypervisorError),
        FsFreeze(agent, guest="u", limit=Seconds(1.0), note=refuse),
    ):
        pass
    assert agent.heard == []


@pytest.mark.parametrize("text", ["[]", "{}", '{"guest": 4}', "nonsense"])
def test_facts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"undo record|Expecting"):
        FsFreezeUndo.from_json(text)
