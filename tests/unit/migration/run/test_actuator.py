"""What is done about a migration, and what is set back or left to us when it has ended."""

import dataclasses

import pytest

from tests.support.engine_runs import ORDER, run
from tests.support.fake_drivers import FakeMover, refusal
from vmckpt.errors import HypervisorError
from vmckpt.migration.request import IDLE_THROTTLE
from vmckpt.migration.run.actions import LimitBandwidth
from vmckpt.migration.run.actuator import Actuator
from vmckpt.model.migration import Outcome
from vmckpt.units import MIB, BytesPerSecond, Seconds

# A run that does not end is an error, not a test that hangs.
pytestmark = pytest.mark.looptime(end=3000)

AUTOSTART = dataclasses.replace(ORDER, autostart=True)


async def test_autostart_is_set_once_the_guest_has_arrived() -> None:
    migrations = FakeMover()
    await run(migrations, order=AUTOSTART)
    left = FakeMover(errors=[refusal("no")])
    await run(left, order=AUTOSTART)

    assert migrations.calls[-2:] == ["autostart", "forget source"]
    assert "autostart" not in left.calls


async def test_autostart_that_cannot_be_set_is_said() -> None:
    migrations = FakeMover(refuses={"autostart": [refusal("no")]})
    ending = await run(migrations, order=AUTOSTART)

    assert ending.outcome is Outcome.COMPLETED
    assert "virsh autostart" in ending.warnings[0]


async def test_what_was_set_is_set_back_and_what_was_not_is_left() -> None:
    warnings: list[str] = []
    migrations = FakeMover()
    actuator = Actuator(migrations)
    await actuator.prepare(Seconds(0.1), None, warnings.append)
    await actuator.apply(LimitBandwidth(BytesPerSecond(MIB)))
    await actuator.restore(warnings.append)

    assert migrations.calls[-2:] == ["bandwidth None", "downtime 0.3"]
    assert not [one for one in migrations.calls if one.startswith("throttle")]
    assert warnings == []


async def test_what_cannot_be_prepared_is_set_back_at_once() -> None:
    warnings: list[str] = []
    migrations = FakeMover(refuses={"throttle": [refusal("no"), refusal("busy")]})
    with pytest.raises(HypervisorError, match="no"):
        await Actuator(migrations).prepare(Seconds(0.1), IDLE_THROTTLE, warnings.append)

    assert migrations.calls[-1] == "downtime 0.3"
    assert warnings == [
        "the CPU throttle of the guest's QEMU may not have been restored: alpha: busy"
    ]
