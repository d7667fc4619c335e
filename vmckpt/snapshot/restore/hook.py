"""The on_restore hook: a shell command that compensates for effects outside a restored guest."""

import asyncio
import signal
from collections.abc import Mapping
from datetime import UTC, datetime

from vmckpt.errors import BadInput
from vmckpt.snapshot.guard import Outside, in_words
from vmckpt.store.format.metadata import Public


def hook_env(public: Public, store: str, *, guest: str, uuid: str, host: str) -> Mapping[str, str]:
    """Return the hook's environment: the restored guest, its host and its snapshot. Pure.

    `public`: the snapshot's public part; `store`: name of its store; `guest`, `uuid`: of the
    restored guest, which differ from those in the snapshot if the guest is a fork.
    """
    made_at = datetime.fromtimestamp(public.made_at, UTC).isoformat(timespec="seconds")
    return {
        "VMCKPT_SNAPSHOT": public.id,
        "VMCKPT_NAME": public.name,
        "VMCKPT_STORE": store,
        "VMCKPT_GUEST": guest,
        "VMCKPT_UUID": uuid,
        "VMCKPT_HOST": host,
        "VMCKPT_ORIGIN": public.guest,
        "VMCKPT_MADE_AT": made_at,
        "VMCKPT_FORK": "1" if uuid != public.guest_uuid else "0",
    }


async def run_hook(command: str, environment: Mapping[str, str], stop: asyncio.Event) -> int:
    """Run the hook on the controller. Its output goes to stderr.

    Setting `stop` kills the hook, but does not undo the restore. Returns the hook's exit status, -N
    if signal N killed the hook, or 127 if the shell cannot be started.
    """
    running = asyncio.create_task(Outside(quiet=True).shell(command, environment, None))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not running.done():
        running.cancel()
        await asyncio.wait({running})
        return -signal.SIGTERM
    try:
        return running.result()
    except BadInput:
        return 127  # the status of a shell that does not find a command


def hook_complaint(command: str, status: int, *, links_down: bool) -> str:
    """Return the message for a hook that failed. `links_down`: the fork's links stay down. Pure."""
    links = "; its network links stay down" if links_down else ""
    return (
        f"the guest was restored, but its on_restore hook failed ({command!r}: {in_words(status)})"
        f"{links}"
    )
