"""The undo process of a group snapshot: releases buffered output if the snapshot dies or hangs.

It is started for each group snapshot but is rarely needed, so it imports large modules on demand.
"""

import json
import os
import select
import sys
import time
from contextlib import suppress

_HELD = b"h"
_ALL_WELL = b"."
_TRIES = 60
_BETWEEN = 0.5


def main() -> None:
    """Wait for the snapshot to end; release the output if it dies or buffers for too long.

    Exits with status 1 if output may still be buffered.
    """
    facts = json.loads(sys.argv[1])
    told = json.loads(facts["undo"])
    word = os.read(0, 1)
    if word == _HELD:
        ready, _, _ = select.select([0], [], [], told["limit"])
        if not ready:
            sys.exit(0 if _undo(facts["uri"], facts["host"], told["undo"], resume=True) else 1)
        word = os.read(0, 1)
    if word != _ALL_WELL:
        sys.exit(0 if _undo(facts["uri"], facts["host"], told["undo"], resume=False) else 1)


def _undo(uri: str, host: str, undo: str, *, resume: bool) -> bool:
    """Release the output, retrying for 30 s.

    `resume`: see network_hold.put_back. Returns whether nothing is buffered any more.
    """
    from vmckpt.capture import network_hold  # noqa: PLC0415
    from vmckpt.errors import HypervisorError  # noqa: PLC0415
    from vmckpt.hypervisor.qemu_process import identity  # noqa: PLC0415
    from vmckpt.hypervisor.qmp import QmpMonitor  # noqa: PLC0415

    facts = network_hold.HoldUndo.from_json(undo)
    for _ in range(_TRIES):
        with suppress(HypervisorError), QmpMonitor(facts.guest, host=host, uri=uri) as monitor:
            network_hold.put_back(monitor, facts, resume=resume)
            return True
        with suppress(HypervisorError):
            if not identity.runs(facts.guest):
                return True  # QEMU has exited, so its buffers are gone
        time.sleep(_BETWEEN)
    return False


if __name__ == "__main__":
    main()
