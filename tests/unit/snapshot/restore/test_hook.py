"""on_restore: what is run once a guest is back."""

import asyncio
import signal
from pathlib import Path

from tests.support.snapshots import PUBLIC
from vmckpt.snapshot.restore import hook as restore_hook


async def test_a_hook_is_told_where_and_when_and_stops_with_us(tmp_path: Path) -> None:
    uuid = PUBLIC.guest_uuid
    told = restore_hook.hook_env(PUBLIC, "near", guest="fork", uuid="other", host="beta")
    assert (told["VMCKPT_ORIGIN"], told["VMCKPT_GUEST"]) == (PUBLIC.guest, "fork")
    assert (told["VMCKPT_FORK"], told["VMCKPT_HOST"]) == ("1", "beta")
    assert told["VMCKPT_MADE_AT"].endswith("+00:00")
    itself = restore_hook.hook_env(PUBLIC, "near", guest=PUBLIC.guest, uuid=uuid, host="beta")
    assert itself["VMCKPT_FORK"] == "0"
    stop, file = asyncio.Event(), tmp_path / "told"
    assert await restore_hook.run_hook(f'echo "$VMCKPT_HOST" > {file}; exit 4', told, stop) == 4
    assert file.read_text() == "beta\n"
    running = asyncio.create_task(restore_hook.run_hook("sleep 60", told, stop))
    await asyncio.sleep(0.1)
    stop.set()
    assert await running == -signal.SIGTERM
