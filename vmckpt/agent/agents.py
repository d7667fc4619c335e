"""Which program takes orders on a host."""

import shutil
import sys
from pathlib import PurePosixPath

from vmckpt.errors import RemoteError
from vmckpt.model.hosts import Host
from vmckpt.remote.ssh import Remote

LIBVIRT = "qemu:///system"
"""As an agent finds it, on its own host."""
_NAME = "vmckpt-agent"
_MODULE = ("-m", "vmckpt.agent.main")
# An agent that is installed there, else the one beside this program if the host sees it, too.
_FIND = r"""
if command -v vmckpt-agent; then exit 0; fi
[ -x "$1" ] && "$1" -c 'import vmckpt.agent.main' 2>/dev/null && echo "$1"
"""


async def command(host: Host) -> tuple[str, ...]:
    """What starts an agent there. Raises RemoteError if there is none."""
    if host.ssh is None:
        if not host.uri.startswith("qemu:///"):
            raise RemoteError(
                f"{host.name}: no ssh address, and it is not this machine",
                mend="add ssh: {address: ...} to the inventory",
            )
        found = shutil.which(_NAME)
        return (found,) if found else (sys.executable, *_MODULE)
    async with Remote(host) as remote:
        told = await remote.run(["sh", "-s", "--", sys.executable], text=_FIND)
    path = told.out.strip()
    if told.status != 0 or not path.startswith("/"):
        raise RemoteError(
            f"{host.name}: no vmckpt-agent there", mend="install vmckpt there: pipx install vmckpt"
        )
    return (path,) if PurePosixPath(path).name == _NAME else (path, *_MODULE)
