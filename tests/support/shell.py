"""A host whose shell is this machine's, and names that a shell would take for something else."""

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path

from vmckpt.model.host import Host, SshAddress
from vmckpt.remote import ssh
from vmckpt.remote.ssh import Answer, Remote, command_line
from vmckpt.units import Seconds


class Shell(Remote):
    """A host whose shell is this machine's, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Host(name="alpha", uri="qemu:///system", ssh=SshAddress(address="a")))
        self.folder = folder

    async def run(
        self, args: Sequence[str], *, text: str = "", limit: Seconds = ssh.COMMAND_LIMIT
    ) -> Answer:
        done = await asyncio.to_thread(
            subprocess.run, [b"/bin/sh", b"-c", command_line(args)], input=text.encode(),
            cwd=self.folder, capture_output=True, check=False, timeout=limit,
        )  # fmt: skip
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        return Answer(status=done.returncode, out=out, err=err)


HOSTILE = [
    "a b", "'", '"', "''\"'\"", "$(touch pwned)", "`touch pwned`", "; touch pwned", "& touch pwned",
    "| touch pwned", "> pwned", "a\nb", "\n", "-rf", "--help", "-", "--", "*", "?", "~", "$HOME",
    "${IFS}", "\\", "\\n", "%s", "!x", "#", "a\tb", "ä€𝄞", "\x1b[2J\x07", "\u202e", "\r", "=",
    "a=b", "", " ", "\udcff", "[/]", "{a,b}", "&&", "||", "<(x)", "x" * 200,
]  # fmt: skip
