"""Fencing with the real fence_ipmilan and ipmitool, which talk IPMI to a management controller."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bmc import SECRET, Bmc
from vmckpt.errors import FencingFailed
from vmckpt.model import fencing as rules
from vmckpt.model.fencing import Action, FenceTopology, Ran
from vmckpt.model.host import Host
from vmckpt.remote import fence_agent
from vmckpt.units import Seconds


@pytest.fixture
def supplies(tmp_path: Path) -> Iterator[tuple[Bmc, Bmc]]:
    """Two power supplies of one host, each with a controller of its own."""
    first = Bmc(tmp_path / "first")
    try:
        second = Bmc(tmp_path / "second")
    except BaseException:
        first.stop()
        raise
    yield first, second
    first.stop()
    second.stop()


def fed_by(*levels: tuple[Bmc, ...]) -> Host:
    topology = FenceTopology(
        tuple(tuple(one.device(power_timeout="1") for one in those) for those in levels)
    )
    return Host(name="alpha", uri="qemu+tcp://alpha/system", fence=topology)


@pytest.fixture
def bmc(tmp_path: Path) -> Iterator[Bmc]:
    bmc = Bmc(tmp_path)
    yield bmc
    bmc.stop()


async def status(bmc: Bmc) -> Ran:
    return await fence_agent.run(bmc.host(), bmc.device(), Action.STATUS, stop=asyncio.Event())


async def refused(host: Host) -> str:
    with pytest.raises(FencingFailed) as caught:
        await fence_agent.power_off(host, asyncio.Event())
    line = str(caught.value)
    assert "\n" not in line
    assert SECRET not in line
    return line


async def test_a_host_is_switched_off_through_its_controller(bmc: Bmc) -> None:
    seen = await status(bmc)
    assert (seen.status, bmc.is_on) == (0, True)

    done = await fence_agent.power_off(bmc.host(), asyncio.Event())
    assert (done.host, done.agent) == ("alpha", "fence_ipmilan")
    assert not bmc.is_on
    await fence_agent.power_off(bmc.host(), asyncio.Event())
    seen = await status(bmc)
    assert seen.status == 2


async def test_a_wrong_password_switches_nothing_off(bmc: Bmc) -> None:
    line = await refused(bmc.host(password="wrong"))
    assert line.startswith(
        "alpha is not known to be off: fence_ipmilan: the host could not be switched"
    )
    assert "exited with 1: Unable to obtain correct plug status" in line
    assert bmc.is_on


async def test_a_host_whose_power_stays_on_is_not_taken_for_off(
    bmc: Bmc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "STAYS_ON", Seconds(0.2))
    bmc.stick()
    line = await refused(bmc.host(power_timeout="1"))
    assert "exited with 1: Timed out waiting to power OFF; " in line
    assert bmc.is_on


async def test_a_controller_that_is_gone_is_one_line(bmc: Bmc) -> None:
    bmc.stop()
    line = await refused(bmc.host(login_timeout="1", power_timeout="1"))
    assert (
        "exited with 1: Connection timed out; run the command again, or switch the host off"
        " yourself" in line
    )


async def test_both_supplies_of_a_host_are_switched_off(supplies: tuple[Bmc, Bmc]) -> None:
    done = await fence_agent.power_off(fed_by(supplies), asyncio.Event())
    assert [one.is_on for one in supplies] == [False, False]
    assert done.agent == "fence_ipmilan and fence_ipmilan"
    assert done.devices == ("fence_ipmilan (device 1 of 2)", "fence_ipmilan (device 2 of 2)")


async def test_a_host_with_one_supply_left_is_not_off(supplies: tuple[Bmc, Bmc]) -> None:
    supplies[1].stick()
    line = await refused(fed_by(supplies))
    assert (
        "fence_ipmilan (device 2 of 2): the host could not be switched off: the fence agent"
        " exited with 1: " in line
    )
    assert [one.is_on for one in supplies] == [False, True]


async def test_the_next_level_is_tried_where_a_controller_is_gone(
    supplies: tuple[Bmc, Bmc],
) -> None:
    supplies[0].stop()
    done = await fence_agent.power_off(fed_by((supplies[0],), (supplies[1],)), asyncio.Event())
    assert (done.level, done.devices) == (2, ("fence_ipmilan (level 2)",))
    assert not supplies[1].is_on
