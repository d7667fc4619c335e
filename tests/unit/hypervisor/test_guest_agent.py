"""The guest agent: it is asked in its own words, and what it does not answer is told."""

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import libvirt
import libvirt_qemu
import pytest

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.guest_agent import CHANNEL, GuestAgent, answers, thaw_left
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.units import Seconds

T = TypeVar("T")


class FakeSeat:
    """Answers for the agent as libvirt would hand it on."""

    host = "alpha"
    state = "running"

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked = answers, list[tuple[str, int]]()

    def on_domain(
        self, what: str, call: Callable[[libvirt.virDomain], T], *, changes: bool = False
    ) -> T:
        assert not changes
        return call(self)  # type: ignore[arg-type]

    def run_state(self) -> str:
        return self.state

    def command(self, text: str, limit: int) -> str:
        name = json.loads(text)["execute"]
        self.asked.append((name, limit))
        answer = self.answers[name]
        if isinstance(answer, HypervisorError):
            raise answer
        return answer if isinstance(answer, str) else json.dumps({"return": answer})


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[GuestAgent, FakeSeat]]:
    monkeypatch.setattr(
        libvirt_qemu, "qemuAgentCommand", lambda seat, text, limit, _: seat.command(text, limit)
    )

    def made(**answers: Any) -> tuple[GuestAgent, FakeSeat]:
        seat = FakeSeat({name.replace("_", "-"): value for name, value in answers.items()})
        return GuestAgent(seat), seat

    return made


Asks = Callable[..., tuple[GuestAgent, FakeSeat]]


def test_the_agent_is_asked_in_its_own_words(asks: Asks) -> None:
    agent, seat = asks(
        guest_ping={}, guest_fsfreeze_freeze=2, guest_fsfreeze_status={"x": 1},
        guest_fsfreeze_thaw=2,
    )  # fmt: skip

    assert agent.there()
    assert agent.freeze(limit=Seconds(0.3)) == 2
    assert agent.thaw() == 2
    assert seat.asked[1:] == [("guest-fsfreeze-freeze", 1), ("guest-fsfreeze-thaw", 5)]
    with pytest.raises(HypervisorError, match="invalid answer from the guest agent"):
        agent.frozen()


def test_interfaces_and_programs_of_the_guest(asks: Asks) -> None:
    agent, _ = asks(
        guest_network_get_interfaces=[
            {"name": "lo", "ip-addresses": [{"ip-address": "127.0.0.1", "prefix": 8}]},
            {"name": "eth\x1b0", "hardware-address": "52:54:00:AA:00:01", "ip-addresses": [
                {"ip-address": "10.0.0.5", "prefix": 24},
                {"ip-address": "fe80::1", "prefix": 64},
                {"ip-address": "2001:db8::5", "prefix": 64},
            ]},
        ],
        guest_exec={"pid": 7},
        guest_exec_status={"exited": True, "exitcode": 2, "err-data": "bm8KZ29vZA=="},
    )  # fmt: skip
    lo, eth = agent.interfaces()
    assert (lo.mac, lo.addresses) == ("", ())
    assert (eth.name, eth.mac) == ("eth?0", "52:54:00:aa:00:01")
    assert eth.addresses == ("10.0.0.5/24", "2001:db8::5/64")
    assert agent.execute("ip", "link", limit=Seconds(3.0)) == (2, "no good")

    slow, _ = asks(guest_exec={"pid": 7}, guest_exec_status={"exited": False})
    with pytest.raises(HypervisorError, match="alpha: ip did not exit in the guest"):
        slow.execute("ip", limit=Seconds(0.0))
    for invalid in ("x", [{"name": "x", "ip-addresses": [{"ip-address": "y"}]}], [7]):
        wrong, _ = asks(guest_network_get_interfaces=invalid)
        with pytest.raises(HypervisorError, match="invalid answer"):
            wrong.interfaces()


def refused(code: int) -> HypervisorError:
    return HypervisorError("no", host="alpha", code=code)


@pytest.mark.parametrize(
    "code",
    [
        libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED, libvirt.VIR_ERR_AGENT_UNRESPONSIVE,
        libvirt.VIR_ERR_OPERATION_INVALID,
    ],
)  # fmt: skip
def test_no_agent_is_an_answer(asks: Asks, code: int) -> None:
    agent, _ = asks(guest_ping=refused(code))

    assert not agent.there()


def test_a_broken_call_is_no_answer(asks: Asks) -> None:
    agent, _ = asks(guest_ping=refused(libvirt.VIR_ERR_RPC))

    with pytest.raises(HypervisorError):
        agent.there()


def test_an_answer_that_is_none_is_one_clear_line(asks: Asks) -> None:
    agent, _ = asks(guest_fsfreeze_status="\x00{")

    with pytest.raises(HypervisorError, match=r"alpha: guest-fsfreeze-status: invalid answer"):
        agent.frozen()


def test_recovery_lets_go_only_what_is_held(asks: Asks) -> None:
    held, seat = asks(guest_ping={}, guest_fsfreeze_status='{"return": "frozen"}',
                      guest_fsfreeze_thaw=1)  # fmt: skip
    free, other = asks(guest_ping={}, guest_fsfreeze_status='{"return": "thawed"}')
    none, _ = asks(guest_ping=refused(libvirt.VIR_ERR_AGENT_UNRESPONSIVE))

    assert (thaw_left(held), thaw_left(free), thaw_left(none)) == (True, False, False)
    assert seat.asked[-1][0] == "guest-fsfreeze-thaw"
    assert len(other.asked) == 2


@pytest.mark.parametrize(
    ("definition", "state", "ping", "expected"),
    [
        (CHANNEL, "running", {}, True), ("", "running", {}, False), (CHANNEL, "paused", {}, False),
        (CHANNEL, "running", HypervisorError("no answer", host="alpha", code=1), False),
    ],
)  # fmt: skip
def test_whether_an_agent_answers_is_known_only_of_a_running_guest(
    asks: Callable[..., tuple[GuestAgent, FakeSeat]], definition: str, state: str, ping: Any,
    expected: bool,
) -> None:  # fmt: skip
    _, seat = asks(guest_ping=ping)
    seat.state = state
    assert answers(cast("QmpMonitor", seat), definition) is expected
