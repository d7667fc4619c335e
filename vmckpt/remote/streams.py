"""The target's end of a migration stream that has died.

QEMU there waits for pages and cannot know that nobody sends any more: TCP tells it nothing. It lets
go only when its socket is closed, and while it waits libvirt cannot ask it to.
"""

from vmckpt.errors import RemoteError
from vmckpt.remote.ssh import Remote, last_line

# Only connections of this guest's QEMU on libvirt's migration ports: its display and other guests'
# streams are not ours to close.
_SCRIPT = r"""
pid=$(cat "/run/libvirt/qemu/$1.pid" 2>/dev/null) || exit 0
case $pid in "" | *[!0-9]*) exit 0 ;; esac
port() { sed -n "s/^ *migration_port_$1 *= *\([0-9]*\).*/\1/p" /etc/libvirt/qemu.conf 2>/dev/null; }
low=$(port min); high=$(port max)
ss -Htnp state established | grep "pid=$pid," | while read -r _ _ here there _; do
    own=${here##*:}
    if [ "$own" -ge "${low:-49152}" ] && [ "$own" -le "${high:-49215}" ]; then
        ss -K -t src "$here" dst "$there" >/dev/null && echo "$there"
    fi
done
"""


async def drop(remote: Remote, guest: str) -> int:
    """Close the streams that come in for a guest; how many there were. Raises RemoteError."""
    if "/" in guest:
        raise RemoteError(f"{guest!r}: no guest can be called so")
    answer = await remote.run(["sh", "-s", "--", guest], text=_SCRIPT)
    if answer.status != 0:
        raise RemoteError(
            f"{remote.host.name}: the stream of {guest} could not be closed:"
            f" {last_line(answer.err, f'status {answer.status}')}"
        )
    return len(answer.out.split())
