"""on_restore: what must be compensated outside once a guest is back, as a line of shell."""

import asyncio
import signal
from collections.abc import Mapping
from datetime import UTC, datetime

from vmckpt.errors import BadInput
from vmckpt.snapshot.guard import Outside, in_words
from vmckpt.store.format.metadata import Public


def hook_env(public: Public, store: str, *, guest: str, uuid: str, host: str) -> Mapping[str, str]:
    """What the hook finds in its environment: who is back where, and from when it is. Pure."""
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
    """Run the hook here; its exit status. Setting `stop` ends it: the guest is back all the same.

    What it prints goes to stderr.
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
        return 127  # as a shell that finds no program


def hook_complaint(command: str, status: int, *, links_down: bool) -> str:
    """What is said of a hook that failed. Pure."""
    links = "; its links stay down" if links_down else ""
    return f"the guest is back, but on_restore failed ({command!r}: {in_words(status)}){links}"
