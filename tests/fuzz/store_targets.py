"""Readers of what a store, another one's file, QEMU or an NBD peer gives; see `targets`.

Checksums are put right first: whoever means harm makes them right, too.
"""

import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import numpy as np
from blake3 import blake3

from vmckpt.capture.nbd import client as nbd_client
from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.session import Export, Session
from vmckpt.capture.qemu_stream import save_image
from vmckpt.capture.qemu_stream.header import Head
from vmckpt.capture.qemu_stream.stream import Addresses, Pages, StreamParser
from vmckpt.errors import HypervisorError, StoreError, VmckptError
from vmckpt.snapshot import archive as snapshot_archive
from vmckpt.store import locks, pending_deletion
from vmckpt.store.backend.base import Backend, Stored
from vmckpt.store.format import manifest, private_part
from vmckpt.store.format import pack as format_pack
from vmckpt.store.format.chunk_map import unpack
from vmckpt.store.format.sealing import Encrypted, Plain
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.repository import parse_format
from vmckpt.units import Seconds

_ID = "s-aaaqeayeaudaocaj"
_SUM = 32
_LONGEST_LINE = 2000
_MOST = 1 << 63


def _one_line(text: object) -> None:
    line = str(text)
    assert line
    assert len(line) <= _LONGEST_LINE, len(line)
    assert "\n" not in line


@contextmanager
def _refused(*errors: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except errors as exc:
        _one_line(exc)


def _summed(data: bytes) -> bytes:
    """With the BLAKE3 of all before it at the end."""
    body = data[:-_SUM]
    return body + blake3(body).digest()


def read_manifest(data: bytes) -> None:
    for one in (data, _summed(data)):
        with _refused(StoreError):
            names = manifest.references(one, _ID).array()
            assert len(np.unique(names)) == len(names)
        with _refused(StoreError):
            manifest.decode(one, _ID, None)


def read_private(data: bytes) -> None:
    with _refused(StoreError, ValueError):
        private, salt = private_part.read(memoryview(data))
        assert salt is None or len(salt) == 32
        told = private_part.written(private, salt)
        assert private_part.read(memoryview(told))[0].facts == private.facts
    with _refused(StoreError, ValueError):
        count = int.from_bytes(data[:2], "little")
        assert len(unpack(memoryview(data[2:]), count, 9)) == count


def read_wraps(data: bytes) -> None:
    for one in (data, _summed(data)):
        with _refused(StoreError):
            assert all(each.isalnum() for each in wrapped_keys.recipients(one, _ID))


def read_pack(data: bytes) -> None:
    for one in (data, _fitting(data)):
        pack = blake3(one).hexdigest()
        with _refused(StoreError):
            index = format_pack.parse(pack, one)
            assert 0 <= index.generation < 1 << 32
            assert int(index.rows["length"].astype(np.int64).sum()) < len(one)
        good, bad = format_pack.salvage(one)
        assert len(good) + len(bad) <= len(one)


def _fitting(data: bytes) -> bytes:
    """A pack whose index has the sum that its footer tells."""
    end = len(data) - format_pack.FOOTER
    if end < 0:
        return data
    count = int.from_bytes(data[end + 32 : end + 36], "little")
    index = data[max(0, end - 60 * count) : end]
    footer = bytes(32) + data[end + 32 :]
    return data[:end] + blake3(index).update(footer).digest() + data[end + 32 :]


def read_small(data: bytes) -> None:
    for key in ("format", "locks/write-1", "condemned/1"):
        raw = manifest.framed(key, data)
        with _refused(StoreError):
            if key == "format":
                parse_format(raw, "here")
            else:
                assert locks.parse_lock(Stored(key, len(raw), Seconds(1.0)), raw, "here").key == key
        with _refused(StoreError):
            pending_deletion.load(cast("Backend", _One(key, raw)))
    with _refused(StoreError):
        manifest.parsed("format", data, "here")


class _One:
    """A store with a single object."""

    where = "here"

    def __init__(self, key: str, raw: bytes) -> None:
        self._key, self._raw = key, raw

    def keys(self, _prefix: str) -> list[Stored]:
        return [Stored(self._key, len(self._raw), Seconds(1.0))]

    def get(self, _key: str) -> bytes:
        return self._raw


def read_bundle(data: bytes) -> None:
    with _refused(StoreError):
        objects = snapshot_archive._Objects(io.BytesIO(data), "a file")
        parse_format(objects.expect("format"), "a file")
        key, raw = objects.begins("snapshots/")
        manifest.references(raw, key)
        for key, pack in objects.rest():
            for name, box, plain in snapshot_archive._boxes(key, pack, "a file"):
                assert len(name) == 32
                assert len(box) <= format_pack.MOST_BOX
                assert plain <= format_pack.MOST_PLAIN


class _Nothing:
    """Takes a stream, and looks that it makes sense."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def begin(self, head: Head) -> None:
        self.sizes = [block.size for block in head.blocks]
        assert all(0 <= size < _MOST for size in self.sizes)

    def pages(self, block: int, addresses: Addresses, data: Pages) -> None:
        assert len(data) == len(addresses)
        assert int(addresses.max()) < self.sizes[block]

    def zeros(self, block: int, addresses: Addresses) -> None:
        assert int(addresses.max()) < self.sizes[block]

    def tail(self, data: memoryview) -> None:
        assert len(data)


def read_stream(data: bytes) -> None:
    for step in (len(data) or 1, 1 + len(data) // 3):
        parser = StreamParser(_Nothing())
        with _refused(VmckptError):
            for at in range(0, len(data), step):
                parser.feed(data[at : at + step])
            parser.finish()


def read_save_image(data: bytes) -> None:
    with _refused(VmckptError):
        save_image.read_header(io.BytesIO(data))


class _Socket:
    """A peer that says all it has to say, and then hangs up."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self._left = 1 << 22

    def recv(self, length: int) -> bytes:
        return self._file.read(length)

    def recv_into(self, room: memoryview) -> int:
        return self._file.readinto(room)

    def sendall(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise BrokenPipeError

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def _connected(data: bytes) -> Any:
    return _Socket(data)


def read_nbd_server(data: bytes) -> None:
    """What a server says to our client."""
    peer = mock.patch.object(nbd_client, "_connect", return_value=_connected(data))
    with peer, _refused(HypervisorError):
        client = nbd_client.Client(wire.Unix("/s"), "vda", host="a", contexts=(wire.ALLOCATION,))
        assert 0 <= client.size < _MOST
        with client:
            for context in client.contexts:
                length = min(client.size, 1 << 20)
                found = list(client.extents(context, 0, length))
                assert sum(one.length for one in found) == length
            if client.size >= 8192:
                assert len(client.read(4096, 4096)) == 4096


_EXPORT = Export(
    1 << 20, lambda _offset, length: bytes(length), lambda _offset, length: iter([(length, True)])
)


def read_nbd_client(data: bytes) -> None:
    """What a client says to our server."""
    Session(wire.NbdSocket(_connected(data)), {"vda": _EXPORT}).run()


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "manifest": read_manifest,
    "private": read_private,
    "wraps": read_wraps,
    "pack": read_pack,
    "small": read_small,
    "bundle": read_bundle,
    "stream": read_stream,
    "save-image": read_save_image,
    "nbd-server": read_nbd_server,
    "nbd-client": read_nbd_client,
}


def seeds() -> Iterator[tuple[str, str, bytes]]:
    """What fuzzing begins with: target, name, bytes. `python -m tests.fuzz.store_targets`."""
    from tests.fixtures import make_store_v1 as v1  # noqa: PLC0415
    from tests.fixtures import make_store_v2 as v2  # noqa: PLC0415
    from tests.support.streams import SHORT, recorded  # noqa: PLC0415

    files = v1.files()
    for name in ("plain", "encrypted"):
        yield "manifest", name, files[f"{name}/snapshots/{v1.ID}"]
    yield "private", "plain", private_part.written(v1.private(Plain()), None)
    yield "private", "salted", private_part.written(v1.private(Encrypted(v1.SALT)), v1.SALT)
    yield "wraps", "two", files[f"encrypted/wraps/{v1.ID}"]
    whole = v2.files()
    for number, key in enumerate(sorted(one for one in whole if one.startswith("packs/"))):
        yield "pack", str(number), whole[key]
    yield "small", "format", json.dumps(v2.FORMAT).encode()
    lock = {"work": "write", "token": "1", "host": "a", "pid": 1, "about": "", "knows": ["1"]}
    yield "small", "lock", json.dumps(lock).encode()
    yield "small", "condemned", json.dumps({"keys": ["wraps/a"]}).encode()
    yield "bundle", "whole", _bundle(whole)
    stream = recorded(SHORT)
    yield "stream", "begin", stream[:12000]
    yield "save-image", "small", save_image.header("<domain/>", running=True, cookie="<cookie/>")
    yield "nbd-server", "talk", _server_says()
    yield "nbd-client", "talk", _client_says()


def _bundle(objects: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    archive = snapshot_archive._Archive(file, 1735689600)
    for beginning in ("format", "snapshots/", "packs/"):
        for key in sorted(one for one in objects if one.startswith(beginning)):
            archive.add(key, objects[key])
    archive.end()
    return file.getvalue()


def _server_says() -> bytes:
    def reply(option: int, kind: int, body: bytes = b"") -> bytes:
        return wire.OPTION_REPLY.pack(wire.OPTION_REPLY_MAGIC, option, kind, len(body)) + body

    context = struct.pack(">I", 1) + wire.ALLOCATION.encode()
    export = wire.EXPORT_INFO.pack(wire.INFO_EXPORT, 16384, wire.HAS_FLAGS | wire.READ_ONLY)
    status = struct.pack(">I", 1) + wire.EXTENT.pack(16384, 0)
    data = struct.pack(">Q", 4096) + bytes(4096)
    return b"".join(
        (
            wire.GREETING, struct.pack(">H", 3),
            reply(wire.OPT_STRUCTURED_REPLY, wire.REP_ACK),
            reply(wire.OPT_SET_META_CONTEXT, wire.REP_META_CONTEXT, context),
            reply(wire.OPT_SET_META_CONTEXT, wire.REP_ACK),
            reply(wire.OPT_GO, wire.REP_INFO, export), reply(wire.OPT_GO, wire.REP_ACK),
            wire.STRUCTURED.pack(wire.STRUCTURED_MAGIC, 1, wire.CHUNK_STATUS, 1, len(status)),
            status,
            wire.STRUCTURED.pack(wire.STRUCTURED_MAGIC, 1, wire.CHUNK_DATA, 2, len(data)), data,
        )
    )  # fmt: skip


def _client_says() -> bytes:
    def option(number: int, body: bytes = b"") -> bytes:
        return wire.OPTION.pack(int.from_bytes(b"IHAVEOPT", "big"), number, len(body)) + body

    def text(word: bytes) -> bytes:
        return struct.pack(">I", len(word)) + word

    contexts = text(b"vda") + struct.pack(">I", 1) + text(wire.ALLOCATION.encode())
    return b"".join(
        (
            struct.pack(">I", 3), option(wire.OPT_STRUCTURED_REPLY), option(wire.OPT_LIST),
            option(wire.OPT_SET_META_CONTEXT, contexts),
            option(wire.OPT_GO, text(b"vda") + struct.pack(">HH", 1, wire.INFO_BLOCK_SIZE)),
            wire.REQUEST.pack(wire.REQUEST_MAGIC, 0, wire.CMD_READ, 1, 4096, 8192),
            wire.REQUEST.pack(wire.REQUEST_MAGIC, 0, wire.CMD_BLOCK_STATUS, 2, 0, 65536),
            wire.REQUEST.pack(wire.REQUEST_MAGIC, 0, wire.CMD_DISC, 3, 0, 0),
        )
    )  # fmt: skip


def main() -> None:
    from tests.fuzz.run import CORPUS  # noqa: PLC0415

    for target, name, data in seeds():
        TARGETS[target](data)
        path = CORPUS / target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
