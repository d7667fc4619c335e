"""Hosts that are powered off by a fence agent, which is a real program here."""

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from tests.support.fence_agents import SECRET, FakeAgent, host
from vmckpt.errors import Cancelled, FencingFailed, InventoryError, VmckptError
from vmckpt.model import fencing as rules
from vmckpt.model.fencing import Action
from vmckpt.model.host import Host, SshAddress
from vmckpt.remote import fence_agent
from vmckpt.units import Seconds


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    monkeypatch.setattr(fence_agent, "_TURN", 0.01)
    monkeypatch.setattr(fence_agent, "_GRACE", 0.2)
    return FakeAgent(tmp_path / "agent")


async def power_off(host: Host) -> rules.Fenced:
    return await fence_agent.power_off(host, asyncio.Event())


async def refused(host: Host) -> str:
    """The one line with which it is refused; no secret is in it."""
    with pytest.raises(VmckptError) as caught:
        await power_off(host)
    line = str(caught.value)
    assert "\n" not in line
    for part in SECRET.split():
        assert part not in line
    return line


async def test_a_host_is_switched_off_and_looked_at(agent: FakeAgent) -> None:
    done = await power_off(agent.host())
    assert (done.host, done.agent) == ("alpha", str(agent.path))
    assert abs(done.at - time.time()) < 60
    assert agent.power == "off"
    assert agent.actions == ["off", "status"]
    asked = agent.calls[0]
    assert asked["options"] == {"ip": "10.9.0.11", "password": SECRET, "action": "off"}
    assert asked["argv"] == []


async def test_one_that_is_off_already_may_be_fenced_again(agent: FakeAgent) -> None:
    await power_off(agent.host())
    await power_off(agent.host())
    assert set(agent.actions) == {"off", "status"}
    assert agent.power == "off"


async def test_a_device_that_needs_a_moment_is_waited_for(agent: FakeAgent) -> None:
    agent.behaves(status="late")
    await power_off(agent.host())
    assert agent.actions == ["off", "status", "status"]


@pytest.mark.parametrize(
    ("modes", "told"),
    [
        (
            {"off": 1},
            "could not be switched off: the fence agent exited with 1; run the command again, or",
        ),
        ({"off": 2, "status": 2}, "could not be switched off: the fence agent exited with 2"),
        ({"off": "dies"}, "the fence agent was killed by signal 9"),
        ({"off": "tells"}, "exited with 1: Unable to connect/login to fencing device; "),
        (
            {"off": "lies"},
            "the device acknowledged the power-off, but still reports that the power is on",
        ),
        ({"status": 1}, "the power state is unknown: the fence agent exited with 1"),
        ({"status": 7}, "the power state is unknown: the fence agent exited with 7"),
        ({"status": "tells"}, "unknown: the fence agent exited with 1: Unable to connect/login"),
    ],
)
async def test_any_other_answer_is_a_refusal(
    agent: FakeAgent, modes: dict[str, str | int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "STAYS_ON", Seconds(0.2))
    agent.behaves(**modes)
    line = await refused(agent.host())
    assert line.startswith("alpha is not known to be off: ")
    assert told in line
    assert "add --host-is-off" in line


@pytest.mark.parametrize("action", ["off", "status"])
async def test_an_agent_that_hangs_is_ended_with_all_it_has_started(
    agent: FakeAgent, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_agent, f"_{action.upper()}_LIMIT", Seconds(0.6))
    monkeypatch.setattr(rules, "STAYS_ON", Seconds(0.1))
    agent.behaves(**{action: "hangs"})
    assert "no answer within 600 ms" in await refused(agent.host())
    assert agent.hanging() == []


async def test_who_stops_it_leaves_nothing_running(agent: FakeAgent) -> None:
    agent.behaves(off="hangs")
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.6, stop.set)
    with pytest.raises(Cancelled, match="it is unknown whether alpha is off"):
        await fence_agent.power_off(agent.host(), stop)
    assert agent.actions == ["off"]
    assert agent.hanging() == []


async def test_an_agent_that_is_missing_or_none_is_one_line(
    agent: FakeAgent, tmp_path: Path
) -> None:
    line = await refused(agent.host(agent="fence_nowhere"))
    assert "fence agent fence_nowhere is not installed on this machine; run apt-get install" in line
    broken = tmp_path / "fence_broken"
    broken.write_text("#!/nowhere/python\n")
    broken.chmod(0o755)
    assert f"{broken} cannot be run" in await refused(agent.host(agent=str(broken)))
    broken.chmod(0o644)
    assert f"fence agent {broken} is not installed" in await refused(agent.host(agent=str(broken)))


async def test_an_agent_is_found_by_its_name(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{agent.path.parent}:{os.environ['PATH']}")
    done = await power_off(agent.host(agent="fence_fake"))
    assert done.agent == "fence_fake"


async def test_a_host_without_an_agent_is_not_fenced() -> None:
    line = await refused(Host(name="alpha", uri="qemu:///system"))
    assert "alpha has no fence agent in the inventory; add fence:" in line


async def test_a_password_is_read_from_its_file_when_it_is_used(
    agent: FakeAgent, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    host = agent.host({"ip": "10.9.0.11"}, password_file=file)
    assert "No such file" in await refused(host)
    assert agent.calls == []
    file.write_text(f"{SECRET}\nmore\n")
    await power_off(host)
    assert agent.calls[0]["options"]["password"] == SECRET


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"  \nx", b"\xff\xfe", b" hunter2", b"hunter2\t\n"]
)
async def test_a_file_without_a_password_is_refused(
    agent: FakeAgent, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    with pytest.raises(InventoryError) as caught:
        await power_off(agent.host({"ip": "10.9.0.11"}, password_file=file))
    assert "hunter2" not in str(caught.value)
    assert agent.calls == []


@pytest.mark.parametrize(("mode", "told"), [(0o600, False), (0o400, False), (0o640, True)])
def test_a_file_that_others_read_is_told_of(
    agent: FakeAgent, tmp_path: Path, mode: int, told: bool
) -> None:
    file = tmp_path / "password"
    file.write_text("x")
    file.chmod(mode)
    topology = agent.host(password_file=file).fence
    assert topology is not None
    assert fence_agent.too_open(topology) == ((file,) if told else ())


async def test_a_host_that_answers_is_not_off_whatever_is_said(agent: FakeAgent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive:
        ssh = SshAddress(address="127.0.0.1", port=alive.getsockname()[1])
        line = await refused(agent.host(ssh=ssh))
    assert (
        "power off was reported, but the host still answers: the device controls another machine"
        in line
    )
    assert (await power_off(agent.host(ssh=ssh))).host == "alpha"


async def test_a_status_switches_nothing_off(agent: FakeAgent) -> None:
    host = agent.host()
    found = await fence_agent.run(host, agent.device(), Action.STATUS, stop=asyncio.Event())
    assert (found.status, agent.power, agent.actions) == (0, "on", ["status"])


async def test_refusals_have_an_exit_code_of_their_own(agent: FakeAgent) -> None:
    agent.behaves(off=1)
    with pytest.raises(FencingFailed) as caught:
        await power_off(agent.host())
    assert caught.value.exit_code == 25


@pytest.fixture
def pair(agent: FakeAgent, tmp_path: Path) -> tuple[FakeAgent, FakeAgent]:
    return agent, FakeAgent(tmp_path / "second")


async def test_all_devices_of_a_level_are_switched_off_before_any_is_looked_at(
    pair: tuple[FakeAgent, FakeAgent],
) -> None:
    one, two = pair
    two.behaves(status="late")
    done = await power_off(host((one.device(), two.device())))
    assert (done.level, done.agent) == (1, f"{one.path} and {two.path}")
    assert done.as_json()["devices"] == [
        f"{one.path} (device 1 of 2)",
        f"{two.path} (device 2 of 2)",
    ]
    # The second round asks both again.
    assert (one.actions, two.actions) == (["off", "status", "status"],) * 2


async def test_a_supply_that_comes_back_means_not_fenced(
    pair: tuple[FakeAgent, FakeAgent],
) -> None:
    one, two = pair
    one.behaves(status="returns")
    two.behaves(status="late")
    line = await refused(host((one.device(), two.device())))
    assert f"{one.path} (device 1 of 2): the device was off and is on again" in line


@pytest.mark.parametrize("why", ["missing", "hangs", "fails", "password"])
async def test_a_level_that_fails_in_any_way_leads_to_the_next(
    pair: tuple[FakeAgent, FakeAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    one, two = pair
    monkeypatch.setattr(fence_agent, "_OFF_LIMIT", Seconds(0.6))
    one.behaves(off={"hangs": "hangs", "fails": "tells"}.get(why, "works"))
    first = {
        "missing": one.device(agent="fence_nowhere"),
        "password": one.device({"ip": "10.9.0.11"}, password_file=tmp_path / "nowhere"),
    }.get(why, one.device())
    done = await power_off(host((first,), (two.device(),)))
    assert (done.level, done.devices) == (2, (f"{two.path} (level 2)",))
    assert (one.power, two.power) == ("on", "off")
    assert one.hanging() == []


async def test_where_no_level_succeeds_each_one_is_told_of_without_a_secret(
    pair: tuple[FakeAgent, FakeAgent],
) -> None:
    one, two = pair
    two.behaves(off="tells")
    line = await refused(host((one.device(agent="fence_nowhere"),), (two.device(),)))
    assert line.startswith(
        "alpha is not known to be off: fence_nowhere (level 1): the host could not be switched"
        f" off: fence agent fence_nowhere is not installed on this machine, and {two.path}"
        " (level 2): the host could"
    )
    assert "add --host-is-off" in line
