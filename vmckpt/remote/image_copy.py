"""Copy the content of an image that is not in use to an image on another host.

QEMU's own tools make the copy: qemu-nbd serves the new image and qemu-img fills it; parts that were
never written stay holes. The connection between the tools uses TLS with a key made for this copy,
so the hosts need no certificates. Each tool runs under a shell, which stops the tool when the
controller's ssh session ends.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vmckpt.errors import RemoteError
from vmckpt.model.host import Host
from vmckpt.remote.agent_channel import AgentProcess
from vmckpt.remote.shell_files import FILES
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

_OPENS_WITHIN = Seconds(30.0)
_SLOWEST = BytesPerSecond(MIB)
"""A copy that is slower than this for one percent of its image is considered broken."""

# The key is the first line of the input, so that no process list shows it; the end of the input
# stops the tool. Image paths are arguments, because a comma in a qemu-img option would split them.
_KEY = r"""
set -u; umask 077
read -r said || exit 1
said=${said#*:\"}; key=${said%%\"*}
keys=$(mktemp -d) || exit 1
child=
# A signal that arrives while qemu-nbd starts may be lost, so it is sent until the process exits.
end() {
    turns=0
    while kill "$child" 2>/dev/null && [ "$turns" -lt 50 ]; do
        sleep 0.1; turns=$((turns + 1))
    done
    child=
}
trap '[ -z "$child" ] || end; rm -rf -- "$keys"' EXIT
trap 'exit 1' HUP INT TERM
printf 'vmckpt:%s\n' "$key" >"$keys/keys.psk"
tls="tls-creds-psk,id=tls,dir=$keys"
"""
# Firewalls between hosts pass only libvirt's migration ports. libvirt uses the range from the lower
# end, so this script starts at the upper end.
SERVE = (
    FILES
    + _KEY
    + r"""
address=$1; format=$2; path=$3
enter "${path%/*}" && hold "${path##*/}" || exit 1
command -v qemu-nbd >/dev/null || { echo "qemu-nbd is not installed" >&2; exit 1; }
# A host may resolve its own name to a loopback address: then listen on all addresses.
ip -o address 2>/dev/null | grep -qF " $address/" || address=
port() {
    sed -n "s/^ *migration_port_$1 *= *\([0-9]*\).*/\1/p" /etc/libvirt/qemu.conf 2>/dev/null |
        tail -n 1
}
low=$(port min); low=${low:-49152}; port=$(port max); port=${port:-49215}
# qemu-nbd starts with only one of IPv4 and IPv6 if another process has the port on the other.
listeners() {
    sed -nE "s/^ *[0-9]+: ([0-9A-F]+):$(printf %04X "$port") [0-9A-F]+:0000 0A .*/\1/p" \
        /proc/net/tcp /proc/net/tcp6 2>/dev/null
}
while [ "$port" -ge "$low" ]; do
    if [ -n "$(listeners)" ]; then
        echo "port $port is in use" >"$keys/errors"
    elif qemu-nbd --fork --pid-file="$keys/pid" --object "$tls,endpoint=server" --tls-creds=tls \
        --bind="$address" --port="$port" --export-name=disk --cache=writeback --discard=unmap \
        --format="$format" -- /proc/self/fd/4 2>"$keys/errors"
    then
        child=$(cat "$keys/pid")
        if [ -n "$address" ] || ! listeners | grep -q '[^0]'; then
            echo "{\"port\": $port}"
            cat >/dev/null
            end # qemu-nbd writes the image's metadata when it exits
            exit 0
        fi
        end
        echo "port $port is in use" >"$keys/errors"
    fi
    grep -q "in use" "$keys/errors" || break
    port=$((port - 1))
done
cat "$keys/errors" >&2
exit 1
"""
)
# The new image reads as zeros. qemu-img flushes the image before it exits with success.
_SEND = (
    _KEY
    + r"""
address=$1; port=$2; format=$3; path=$4; rate=$5
exec 3<&0
: >"$keys/said"
qemu-img convert -p -n -W -m 8 -t none --target-is-zero ${rate:+-r "$rate"} \
    --object "$tls,username=vmckpt,endpoint=client" --target-image-opts -f "$format" -- "$path" \
    "driver=nbd,host=$address,port=$port,export=disk,tls-creds=tls" \
    >"$keys/said" 2>"$keys/errors" </dev/null &
child=$!
(cat <&3 >/dev/null; kill "$child") >/dev/null 2>&1 &
watcher=$!
while kill -0 "$child" 2>/dev/null; do
    part=$(tr '\r' '\n' <"$keys/said" | sed -n 's/.*(\([0-9]\{1,3\}\)\..*/\1/p' | tail -n 1)
    echo "{\"percent\": ${part:-0}}"
    sleep 1
done
wait "$child"; status=$?
child=
kill "$watcher" 2>/dev/null
[ "$status" = 0 ] || { tail -n 1 "$keys/errors" >&2; exit 1; }
echo '{"percent": 100, "done": true}'
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content to copy, and its destination."""

    path: str
    format: str
    size: Bytes
    """Virtual size of the image."""
    to: str
    """Path of an empty image of the same format and size on the target."""
    address: str
    """Address of the target as seen from the source."""
    limit: BytesPerSecond | None = None

    @property
    def patience(self) -> Seconds:
        """How long the copy may make no progress: QEMU reports only whole percents."""
        slowest = min(_SLOWEST, self.limit or _SLOWEST)
        return Seconds(60.0 + self.size / 100 / slowest)


async def copy(source: Host, target: Host, what: Content, tell: Callable[[float], None]) -> None:
    """Copy an image's content to the image on the target.

    `tell` is called with the progress, 0 to 1. Neither image may be in use. The copy locks both, so
    a guest that uses either of them cannot be started meanwhile. Raises RemoteError if the copy
    fails; the target's image is then incomplete.
    """
    key = {"key": secrets.token_hex(32)}
    serve = ["sh", "-c", SERVE, "sh", what.address, what.format, what.to]
    async with AgentProcess(target, serve) as server:
        await server.send(key)
        port = int(_number(server, await _heard(server, _OPENS_WITHIN), "port"))
        rate = "" if what.limit is None else str(what.limit)
        send = ["sh", "-c", _SEND, "sh", what.address, str(port), what.format, what.path, rate]
        try:
            async with AgentProcess(source, send) as sender:
                await sender.send(key)
                await _followed(sender, what, tell)
        except RemoteError as exc:
            # The cause may be on either host. The error names the target, because a retry uses
            # another target.
            why = f"{target.name}: the copy of {what.path} is incomplete: {exc.message}"
            raise RemoteError(why, host=target.name, hint=exc.hint) from exc


async def _followed(sender: AgentProcess, what: Content, tell: Callable[[float], None]) -> None:
    """Report progress until the copy is done. Raises RemoteError if it fails or hangs."""
    loop = asyncio.get_running_loop()
    done, since = -1.0, loop.time()
    while True:
        said = await _heard(sender, _OPENS_WITHIN)
        part = _number(sender, said, "percent") / 100
        if part > done:
            done, since = part, loop.time()
            tell(min(1.0, part))
        if said.get("done"):
            return
        if loop.time() - since > what.patience:
            raise RemoteError(
                f"{sender.host.name}: the copy of {what.path} is making no progress",
                host=sender.host.name,
                hint="check the network between the hosts",
            )


async def _heard(program: AgentProcess, limit: Seconds) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(program.receive(), limit)
    except TimeoutError as exc:
        raise RemoteError(
            f"{program.host.name}: no progress report from the copy within {limit:g} s",
            host=program.host.name,
        ) from exc


def _number(program: AgentProcess, said: dict[str, Any], key: str) -> float:
    value = said.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 65535:
        raise RemoteError(
            f"{program.host.name}: invalid progress report from the copy", host=program.host.name
        )
    return value
