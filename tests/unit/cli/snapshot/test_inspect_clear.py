"""Whatever is wrong with a store: one line says what, where and the mend, and nothing changed."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.bucket import CREDENTIALS
from tests.support.stocking import Stock, flip, id_of, stocked
from vmckpt.store import pending_deletion
from vmckpt.store.format import manifest, pack
from vmckpt.store.locks import Lock, LockPurpose

KEY = "--identity"


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    """Two encrypted snapshots in `near`, one of them in `far`, too."""
    stock = stocked(tmp_path, monkeypatch, capsys)
    stock.encrypt()
    stock.put("one", list(range(40)))
    stock.put("two", [*range(30), 70, 71])
    assert stock("copy", "one", "--to", "far")[0] == 0
    return stock


def content(folder: Path) -> dict[str, bytes]:
    """All but what checks have found, which is written down."""
    files = [one for one in folder.rglob("*") if one.is_file() and one.parent.name != "verified"]
    return {str(one): one.read_bytes() for one in files}


def newer_store(stock: Stock) -> None:
    told = {"version": 2, "id": stock.store().id}
    (stock.folder / "near" / "format").write_bytes(manifest.written("format", told))


def damaged_store(stock: Stock) -> None:
    flip(stock.folder / "near" / "format", 20)


def newer_manifest(stock: Stock) -> None:
    path = stock.folder / "near" / "snapshots" / id_of("one")
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(bytes(data[:-32]) + blake3(data[:-32]).digest())


def missing_pack(stock: Stock) -> None:
    stock.packs()[0].unlink()


def missing_chunk(stock: Stock) -> None:
    """The largest pack, without its first box."""
    path = stock.packs()[0]
    data = path.read_bytes()
    rows = pack.parse(path.name, data).rows.tolist()[1:]
    left = [(name, data[at : at + length], plain) for name, at, length, plain, _ in rows]
    path.unlink()
    made = pack.encode(left, bytes(16))
    stock.store().backend.put(pack.key_of(blake3(made).hexdigest()), made)


def missing_wraps(stock: Stock) -> None:
    (stock.folder / "near" / "wraps" / id_of("one")).unlink()


def nothing(_: Stock) -> None:
    """It is the command that is wrong."""


def stranger(stock: Stock) -> str:
    return str(stock.identity("bob"))


VERIFY, COPY, GC = ("verify",), ("copy", "one", "--to", "far"), ("gc", "--grace", "0s")
EXPORT = ("export", "one", "file")
ALL = (VERIFY, COPY, GC, EXPORT, ("pin", "one"), ("delete", "one", "--yes"))
BY_ID = ("copy", id_of("one"), "--to", "far")
CASES: tuple[tuple[Callable[[Stock], None], tuple[tuple[str, ...], ...], int, str, str], ...] = (
    (newer_store, ALL, 42, "has store version 2", "use the vmckpt version that created the store"),
    (damaged_store, ALL, 41, "format is damaged", "snapshot"),
    (newer_manifest, (VERIFY, GC, BY_ID), 42, "version 2", "use the vmckpt version that wrote the"),
    (missing_pack, (VERIFY,), 41, "chunks without an intact copy", "--repair --from STORE"),
    (missing_pack, (EXPORT,), 41, "no intact pack has chunk", "verify to see which snapshots"),
    (missing_chunk, (VERIFY,), 41, "chunks without an intact copy", "--repair --from STORE"),
    (missing_chunk, (EXPORT,), 41, "no intact pack has chunk", "verify to see which snapshots"),
    (missing_wraps, (VERIFY, COPY, EXPORT), 41, "wraps", ""),
    (nothing, (("show", "three"),), 45, "no snapshot 'three'", "snapshot list"),
    (
        nothing,
        (("import", "hosts.yaml"),),
        41,
        "hosts.yaml: the archive is truncated",
        "export the snapshot again",
    ),
)


@pytest.mark.parametrize(
    ("harm", "command", "code", "what", "hint"),
    [
        pytest.param(harm, command, code, what, hint, id=f"{harm.__name__} {command[0]}")
        for harm, commands, code, what, hint in CASES
        for command in commands
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_changed(
    stock: Stock, harm: Callable[[Stock], None], command: tuple[str, ...], code: int, what: str,
    hint: str,
) -> None:  # fmt: skip
    harm(stock)
    before = content(stock.folder / "near") | content(stock.folder / "far")
    ended, said, told = stock(*command)
    # What is being done, and what was not looked at, is told beside.
    beside = ("not opened: ", "reading manifests")
    wrong = "".join(one for one in told.splitlines(keepends=True) if not one.startswith(beside))

    assert (ended, len(wrong.splitlines())) == (code, 1), wrong
    assert wrong.startswith("error: ")
    assert what in said + wrong
    assert hint in wrong
    assert len(wrong) < 400
    assert content(stock.folder / "near") | content(stock.folder / "far") == before
    assert not (stock.folder / "file").exists()


@pytest.mark.parametrize("command", [("verify", "--deep"), ("diff", "one", "two")])
def test_a_wrong_key_is_one_line(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    phrase = stock.folder / "phrase"
    phrase.write_text("correct horse\n")
    phrase.chmod(0o600)
    monkeypatch.setenv("VMCKPT_PASSPHRASE_FILE", str(phrase))
    more = (KEY, stranger(stock))
    code, _, wrong = stock(*command, *more)
    assert (code, len(wrong.splitlines())) == (43, 1), wrong
    assert "identity" in wrong


def test_one_flipped_bit_in_each_kind_of_object_is_found_and_named(stock: Stock) -> None:
    """Of every object, in each part of it, by the command."""
    assert stock("pin", "one")[0] == 0
    pending_deletion.write(stock.store().backend, ["wraps/gone"])
    lock = Lock(stock.store().backend, LockPurpose.WRITE)
    lock.take()
    rng = random.Random(3)
    kinds = set()
    try:
        for path in sorted(one for one in (stock.folder / "near").rglob("*") if one.is_file()):
            name = str(path.relative_to(stock.folder / "near"))
            kinds.add(name.partition("/")[0])
            good = path.read_bytes()
            for part in range(5):
                at = rng.randrange(len(good) * part // 5, max(1, len(good) * (part + 1) // 5))
                flip(path, at, 1 << rng.randrange(8))
                code, said, wrong = stock("verify", "--sealed")
                named = said if "objects are damaged" not in wrong else said + wrong
                assert (code, name in named or name in wrong) == (41, True), (name, at, said, wrong)
                path.write_bytes(good)
    finally:
        lock.release()
    assert kinds == {"format", "packs", "snapshots", "wraps", "pins", "locks", "condemned"}
    assert stock("verify", "--sealed")[0] == 0


class Bad(BaseHTTPRequestHandler):
    """An S3 server that answers everything in one way."""

    status, word = 503, "SlowDown"

    def _answer(self) -> None:
        if self.status == 0:
            time.sleep(3)
            return
        body = f"<Error><Code>{self.word}</Code><Message>no</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def bad_server(status: int, word: str) -> Iterator[str]:
    kind = type("Now", (Bad,), {"status": status, "word": word})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "word", "what"),
    [
        pytest.param(503, "SlowDown", "SlowDown", id="asks for patience"),
        pytest.param(403, "AccessDenied", "AccessDenied", id="denies"),
        pytest.param(0, "", "", id="says nothing"),
        pytest.param(507, "InsufficientStorage", "no space", id="is full"),
    ],
)
@pytest.mark.parametrize("command", [("list",), ("verify",), ("copy", "one", "--to", "bucket")])
def test_an_s3_server_that_does_not_serve_is_one_line(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, status: int, word: str, what: str,
    command: tuple[str, ...],
) -> None:  # fmt: skip
    from vmckpt.store.backend.s3 import S3  # noqa: PLC0415

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    quick = {**(S3.__init__.__kwdefaults__ or {}), "patience": 0.5, "attempts": 2}
    monkeypatch.setattr(S3.__init__, "__kwdefaults__", quick)
    with bad_server(status, word) as endpoint:
        hosts = stock.folder / "hosts.yaml"
        hosts.write_text(
            hosts.read_text().replace("{near:", f"{{bucket: 's3://b/p?endpoint={endpoint}', near:")
        )
        more = () if command[0] == "copy" else ("--store", "bucket")
        code, said, wrong = stock(*command, *more)
    assert (code in {40, 44}, len(wrong.splitlines())) == (True, 1), (code, said, wrong)
    assert "s3://b/p" in wrong
    assert what in wrong
    assert "; " in wrong, "no mend"
