"""Asks a host what it has for snapshots."""

from collections.abc import Awaitable, Callable, Mapping

from vmckpt.doctor.snapshots import HostReady
from vmckpt.errors import RemoteError
from vmckpt.model.host import Host
from vmckpt.remote.ssh import Remote
from vmckpt.units import Bytes

# Only looks. Whether root may write to what is mounted read-only, the kernel tells, too.
_SCRIPT = r"""
at=$1; shift
while [ ! -e "$at" ] && [ "$at" != / ]; do at=$(dirname "$at"); done
[ -d "$at" ] && [ -w "$at" ] && df -PB1 -- "$at" | awk 'NR==2 {print "room", $4}'
for store in "$@"; do
    if [ ! -f "$store/format" ]; then printf 'absent %s\n' "$store"
    elif [ ! -w "$store" ]; then printf 'closed %s\n' "$store"
    fi
done
"""
_WORDS = {"absent": "there is no store at {}", "closed": "{} is not writable"}


async def ask(
    host: Host, stores: Mapping[str, str], find_agent: Callable[[Host], Awaitable[object]]
) -> HostReady | None:
    """What a host has; `stores`: folders by name. None: it has no ssh address, or no answer.

    `find_agent` raises RemoteError if there is none and none can be brought there.
    """
    if host.ssh is None:
        return None
    try:
        async with Remote(host) as remote:
            told = await remote.run(
                ["sh", "-s", "--", host.agent_state, *stores.values()], text=_SCRIPT
            )
    except RemoteError:
        return None  # doctor tells of it elsewhere
    try:
        await find_agent(host)
        agent = None
    except RemoteError as exc:
        agent = exc.message.removeprefix(f"{host.name}: ")
    return read(host, stores, told.out, agent)


def read(host: Host, stores: Mapping[str, str], text: str, agent: str | None) -> HostReady:
    """The script's answer. Pure."""
    room: Bytes | None = None
    wrong: dict[str, str] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "room" and rest.isdecimal() and len(rest) < 19:
            room = Bytes(int(rest))
        elif word in _WORDS:
            wrong[rest] = _WORDS[word].format(rest)
    return HostReady(
        name=host.name, agent=agent, state=host.agent_state, room=room,
        stores={name: wrong.get(folder) for name, folder in stores.items()},
    )  # fmt: skip
