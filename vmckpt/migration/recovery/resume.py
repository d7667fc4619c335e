"""Going on by hand with a post-copy that broke, under the order that it was begun with."""

from vmckpt.errors import BadInput
from vmckpt.journal.recorder import Recorder
from vmckpt.migration.recovery.decide import RecoveryAction
from vmckpt.migration.recovery.recover import OpenSteps, Recovery
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.request import Setting
from vmckpt.model.events import Caller


async def resume(
    setting: Setting, left: OpenSteps, recorder: Recorder, caller: Caller
) -> MigrationReport:
    """Resume, as the job's controller from now on.

    Raises BadInput if there is nothing to resume: the journal has no order, or the guest is not in
    post-copy.
    """
    async with Recovery(setting, left) as recovery:
        verdict = await recovery.decide()
        if RecoveryAction.RESUME not in verdict.acts:
            raise BadInput(
                f"there is no post-copy of {left.operation.guest} to resume: {verdict.truth}",
                hint=verdict.settle or "run vmckpt recover",
            )
        await recovery.carry_out(verdict, recorder, caller)
        assert recovery.ending is not None
        return recovery.report(recovery.ending)
