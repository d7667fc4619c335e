"""Whether a source can swear that the target never had all of a guest."""

import time

from vmckpt.errors import RemoteError
from vmckpt.hypervisor import migration_leftovers
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migrate.gather import Remotes
from vmckpt.remote import probe


async def never_sent(
    source: Hypervisor, uuid: str, remotes: Remotes | None, *, since: float
) -> bool:
    """Of a guest that runs on the source, and a migration that began at `since` (Unix time): what
    lacks even a page of it runs nowhere. False: that cannot be known.

    A host that was started since may have another QEMU of the guest, by autostart; what that one
    says of streams is not about this migration.
    """
    if remotes is None:
        return False
    try:
        up = await probe.uptime(remotes[0])
    except RemoteError:
        return False
    return up > time.time() - since and await migration_leftovers.never_sent(source, uuid)
