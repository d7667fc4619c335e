"""Fencing with the real fence_ipmilan and ipmitool, which talk IPMI to a management controller."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.bmc import SECRET, Bmc
from vmckpt.errors import FencingFailed
from vmckpt.model import fencing as rules
from vmckpt.model.fencing import Action
from vmckpt.model.hosts import Host
from vmckpt.remote import fencing
from vmckpt.units import Seconds


@pytest.fixture
def bmc(tmp_path: Path) -> Iterator[Bmc]:
    bmc = Bmc(tmp_path)
    yield bmc
    bmc.stop()


async def refused(host: Host) -> str:
    with pytest.raises(FencingFailed) as caught:
        await fencing.power_off(host, asyncio.Event())
    line = str(caught.value)
    assert "\n" not in line
    assert SECRET not in line
    return line


async def test_a_host_is_switched_off_through_its_controller(bmc: Bmc) -> None:
    seen = await fencing.run(bmc.host(), Action.STATUS, stop=asyncio.Event())
    assert (seen.status, bmc.is_on) == (0, True)

    done = await fencing.power_off(bmc.host(), asyncio.Event())
    assert (done.host, done.agent) == ("alpha", "fence_ipmilan")
    assert not bmc.is_on
    await fencing.power_off(bmc.host(), asyncio.Event())
    seen = await fencing.run(bmc.host(), Action.STATUS, stop=asyncio.Event())
    assert seen.status == 2


async def test_a_wrong_password_switches_nothing_off(bmc: Bmc) -> None:
    line = await refused(bmc.host(password="wrong"))
    assert line.startswith("alpha is not known to be off: fence_ipmilan: it could not be switched")
    assert "ended with 1: Unable to obtain correct plug status" in line
    assert bmc.is_on


async def test_a_host_whose_power_stays_on_is_not_taken_for_off(
    bmc: Bmc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "STAYS_ON", Seconds(0.2))
    bmc.stick()
    line = await refused(bmc.host(power_timeout="1"))
    assert "ended with 1: Timed out waiting to power OFF; " in line
    assert bmc.is_on


async def test_a_controller_that_is_gone_is_one_line(bmc: Bmc) -> None:
    bmc.stop()
    line = await refused(bmc.host(login_timeout="1", power_timeout="1"))
    assert "ended with 1: Connection timed out; run this again, or switch it off yourself" in line
