"""Delay the streams of migrations to a host with a proxy.

The kernel may have no netem, so the delay is added in user space. The proxy listens on libvirt's
migration ports at its own address, and the lab's inventory has this address as the host's migration
address. The proxy buffers a limited amount, so that TCP slows the sender down as on a real link.
"""

import asyncio
import re
import sys
from collections import deque

from vmckpt.errors import LabError
from vmckpt.units import Seconds
from vmckpt_lab import network
from vmckpt_lab.plan import HostPlan, LabPlan
from vmckpt_lab.shell import in_namespace, run, start_daemon

_PORTS = range(49152, 49168)
_CHUNK = 64 * 1024
# Maximum number of delayed bytes, in each direction of a connection.
_WINDOW = 16 * 1024 * 1024


def put(plan: LabPlan, name: str, one_way: Seconds | None) -> None:
    """Delay streams of migrations to a host by `one_way` seconds; None removes the delay.

    Raises LabError.
    """
    host = plan.host(name)
    namespace = f"{plan.prefix}far-{name}"
    if namespace in network.namespaces(plan.prefix):
        network.kill_all([namespace])
        run(["ip", "netns", "del", namespace])
    if one_way is None:
        _address_for_streams(plan, host, host.address)
        return
    address = _address(host)
    network.side_room(plan, namespace, f"far{host.address.rpartition('.')[2]}", f"{address}/24")
    words = [address, host.address, str(one_way)]
    program = [sys.executable, "-m", "vmckpt_lab.delay_proxy", *words]
    start_daemon(in_namespace(namespace, *program), plan.folder / f"far-{name}.log")
    _address_for_streams(plan, host, address)


def _address(host: HostPlan) -> str:
    """Return the proxy's address: the host's address with 100 added to its last number."""
    network_part, _, number = host.address.rpartition(".")
    return f"{network_part}.{int(number) + 100}"


def _address_for_streams(plan: LabPlan, host: HostPlan, address: str) -> None:
    """Set a host's migration address in the lab's inventory. Raises LabError."""
    text = plan.inventory.read_text()
    entry = rf"(?ms)(^  {host.name}:$.*?^    migration_address: )\S+$"
    changed, count = re.subn(entry, rf"\g<1>{address}", text, count=1)
    if count != 1:
        raise LabError(f"{plan.inventory} has no migration_address for {host.name}")
    partial = plan.inventory.with_suffix(".new")
    partial.write_text(changed)
    partial.rename(plan.inventory)


class _Way:
    """One direction of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def carry(self, one_way: float) -> None:
        """Forward data with a delay of `one_way` seconds, until the sender closes its side."""
        sending = asyncio.create_task(self._send())
        try:
            while data := await self._reader.read(_CHUNK):
                await self._room.wait()
                self._put(data, one_way)
            self._put(b"", one_way)
            await sending
        except OSError:
            sending.cancel()
            self._writer.close()

    def _put(self, data: bytes, one_way: float) -> None:
        self._under_way.append((asyncio.get_running_loop().time() + one_way, data))
        self._size += len(data)
        self._changed.set()
        if self._size > _WINDOW:
            self._room.clear()

    async def _send(self) -> None:
        while True:
            while not self._under_way:
                self._changed.clear()
                await self._changed.wait()
            due, data = self._under_way.popleft()
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            if not data:
                self._writer.close()
                return
            self._size -= len(data)
            self._room.set()
            self._writer.write(data)
            await self._writer.drain()


async def serve(address: str, host: str, one_way: float) -> None:
    """Forward all migration ports of `host`, forever. `one_way`: the delay, in seconds."""

    async def forward(port: int) -> asyncio.Server:
        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there, back = await asyncio.open_connection(host, port)
            except OSError:
                writer.close()
                return
            ways = _Way(reader, back), _Way(there, writer)
            await asyncio.gather(*(way.carry(one_way) for way in ways), return_exceptions=True)

        return await asyncio.start_server(connect, address, port)

    servers = [await forward(port) for port in _PORTS]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], float(sys.argv[3])))
