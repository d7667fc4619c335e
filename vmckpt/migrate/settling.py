"""A migration without a controller, as recovery asks for it."""

from collections.abc import Sequence

from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import Unattended
from vmckpt.journal.records import Operation
from vmckpt.migrate import recovering
from vmckpt.migrate.recovering import Recovery
from vmckpt.migrate.requests import Setting
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy


def setting_of(operation: Operation, inventory: Inventory, policies: Sequence[Policy]) -> Setting:
    """Where an operation takes place. Raises InventoryError."""
    source = inventory.host(operation.source or "")
    target = inventory.host(operation.target or "")
    others = [one for one in inventory.hosts.values() if one not in (source, target)]
    return Setting(source=source, target=target, policies=policies, outside=None, others=others)


async def settle(case: Unattended, policies: Sequence[Policy]) -> Settled:
    """See recover.rooms.Room."""
    setting = setting_of(case.operation, case.inventory, policies)
    async with Recovery(setting, recovering.left(case.operation, case.steps)) as recovery:
        verdict = await recovery.decide()
        told = recovering.settled(verdict)
        if case.recorder is None or not verdict.known or (told.goes_on and not case.adopt):
            return told
        return await recovery.carry_out(verdict, case.recorder, case.caller)
