"""What only a real S3 server does: check signatures, serialise writers, come back, fill up."""

import random
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.bucket import CREDENTIALS, Rclone, Seaweed
from tests.support.storing import assert_no_garbage, assert_whole, chunks, gc, read, write
from vmckpt import inventory
from vmckpt.app import hosts
from vmckpt.doctor import checks as doctor_checks
from vmckpt.errors import StoreError
from vmckpt.model.finding import Finding, Severity
from vmckpt.store.backend import s3
from vmckpt.store.backend.s3 import S3
from vmckpt.store.repository import Store
from vmckpt.units import Seconds
from vmckpt_lab.certificates import Authority


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in CREDENTIALS.items():
        monkeypatch.setenv(key, value)


@pytest.fixture(scope="module")
def server(seaweed: Seaweed) -> Seaweed:
    seaweed.bucket("real")
    return seaweed


@pytest.fixture
def backend(server: Seaweed, request: pytest.FixtureRequest) -> S3:
    return S3("real", request.node.originalname, endpoint=server.endpoint)


def put_at_once(backend: S3, key: str, size: int) -> list[int]:
    """Four writers of one name; the numbers of those that won. Each writes its own number."""
    ready = threading.Barrier(4)

    def put(number: int) -> bool:
        ready.wait(30)
        return backend.put(key, bytes([number]) * size)

    with ThreadPoolExecutor(4) as pool:
        return [number for number, won in enumerate(pool.map(put, range(4))) if won]


def test_of_many_writers_of_one_name_one_wins(backend: S3) -> None:
    (winner,) = put_at_once(backend, "packs/one", 100)
    assert backend.get("packs/one") == bytes([winner]) * 100


def test_of_many_writers_in_parts_what_is_kept_is_that_of_a_winner(
    backend: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine SeaweedFS 4.48 lets two complete their upload: it looks whether the name is
    there before it takes it. The store does not depend on it: only packs are
    large enough for parts, and a pack's name is the hash of its content."""
    part = 5 << 20
    monkeypatch.setattr(s3, "_PART", part)
    size = 2 * part + 1
    winners = put_at_once(backend, "packs/parts", size)
    assert backend.get("packs/parts") in [bytes([winner]) * size for winner in winners]
    assert list(backend.leftovers()) == []


def test_writers_and_a_collection_at_the_same_time(backend: S3, server: Seaweed) -> None:
    Store.create(backend)

    def work(name: str) -> None:
        mine = S3("real", backend._prefix, endpoint=server.endpoint)
        for turn in range(3):
            write(Store.open(mine), f"{name}{turn}", chunks(turn, 7, hash(name) % 99))

    with ThreadPoolExecutor(3) as pool:
        each = [pool.submit(work, name) for name in ("a", "b")]
        while not all(one.done() for one in each):
            gc(Store.open(backend))
        for one in each:
            one.result()
    store = Store.open(backend)
    assert len(store.manifests()) == 6
    assert_whole(store)
    assert_no_garbage(store)
    assert_whole(store)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"),
        ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"),
    ],
)
def test_a_wrong_key_is_one_clear_line(
    server: Seaweed, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    monkeypatch.setenv(name, "wrong")
    stranger = S3("real", "x", endpoint=server.endpoint)
    for work in (Store.create, Store.open):
        with pytest.raises(StoreError) as caught:
            work(stranger)
        line = f"the server refuses access ({code}); check the access key and the bucket's policy"
        assert str(caught.value) == f"s3://real/x: format: {line}"
    with pytest.raises(StoreError, match=rf"refuses access \({code}\)"):
        list(stranger.keys("packs/"))


def test_a_server_that_writes_over_what_is_there_is_refused(tmp_path: Path) -> None:
    rclone = Rclone(tmp_path)
    try:
        rclone.bucket("bad")
        backend = S3("bad", "x", endpoint=rclone.endpoint)
        with pytest.raises(StoreError) as caught:
            Store.create(backend)
        assert str(caught.value).startswith(
            f"s3://bad/x: the server at {rclone.endpoint} ignores If-None-Match and overwrites"
        )
        assert list(backend.keys("format")) == []
    finally:
        rclone.stop()


def found_by_doctor(bucket: str, endpoint: str, *, read_only: bool = False) -> Finding:
    text = f"hosts: {{a: {{uri: 'qemu:///system'}}}}\nstores: {{far: 's3://{bucket}/x?endpoint="
    text += f"{endpoint}'}}\nread_only: {str(read_only).lower()}\n"
    known = inventory.parse(text, Path("hosts.yaml"))
    found = doctor_checks.of_controller(hosts._controller(known))
    return next(one for one in found if one.code == "snapshot-store")


def test_doctor_names_a_server_that_writes_over_what_is_there(
    tmp_path: Path, server: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    Store.create(S3("real", "x", endpoint=server.endpoint))
    good = found_by_doctor("real", server.endpoint)
    assert (good.severity, good.text) == (
        Severity.OK, "store far: can be opened, and its locks work",
    )  # fmt: skip
    (tmp_path / "kept").mkdir()
    rclone = Rclone(tmp_path / "kept")
    try:
        rclone.bucket("bad")
        # A store that is there already, as on a server that was good once.
        made = S3("real", "x", endpoint=server.endpoint).get("format")
        bad = S3("bad", "x", endpoint=rclone.endpoint)
        bad.put("format", made, replace=True)
        found = found_by_doctor("bad", rclone.endpoint)
        assert found.severity is Severity.WARNING
        assert f"the server at {rclone.endpoint} ignores If-None-Match" in found.text
        assert found.hint is not None
        assert found.hint.startswith("use a server that supports conditional writes")
        assert list((tmp_path / "kept").rglob("probe*")) == []
        # Who only looks writes nothing, so it is not known.
        looked = found_by_doctor("bad", rclone.endpoint, read_only=True)
        assert (looked.severity, looked.text) == (Severity.OK, "store far: can be opened")
    finally:
        rclone.stop()


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A server that may be killed, and that speaks TLS as well."""
    folder = tmp_path_factory.mktemp("certified")
    authority = Authority("s3")
    key, certificate = authority.issue("s3", ["127.0.0.1"])
    for name, content in (("key", key), ("certificate", certificate), ("ca", authority.pem)):
        (folder / name).write_bytes(content)
    server = Seaweed(folder=folder, tls=(folder / "certificate", folder / "key"))
    try:
        yield server
    finally:
        server.stop()


def test_tls_needs_a_known_authority(
    certified: Seaweed, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    certified.bucket("tls")
    with pytest.raises(StoreError, match=r"s3://tls: .*certificate verify failed"):
        Store.create(S3("tls", endpoint=certified.secure, attempts=1))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certified.folder / "ca"))
    store = Store.create(S3("tls", endpoint=certified.secure))
    write(store, "one", chunks(1, 2))
    assert_whole(store)


def test_what_was_published_outlives_a_killed_server(certified: Seaweed) -> None:
    certified.bucket("killed")
    backend = S3("killed", endpoint=certified.endpoint, attempts=1, patience=Seconds(5.0))
    store = Store.create(backend)
    published: list[str] = []
    enough = threading.Event()

    def work() -> None:
        with suppress(StoreError):
            for number in range(1000):
                write(store, f"s{number}", chunks(*range(number, number + 9)))
                published.append(f"s{number}")
                if number == 2:
                    enough.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert enough.wait(30)
    time.sleep(random.random() / 5)
    certified.kill()
    thread.join()
    with pytest.raises(
        StoreError, match=r"s3://killed: .*no answer: .*; check that the server is running"
    ):
        Store.open(backend)

    certified.start()
    again = Store.open(S3("killed", endpoint=certified.endpoint))
    there = {one.id for one in again.manifests()}
    # The last one may have been published without the answer having arrived.
    assert set(published) <= there <= {*published, f"s{len(published)}"}
    assert_whole(again)
    write(again, "after", chunks(1, 5, 2000))
    assert_no_garbage(again)
    assert_whole(again)
    assert read(again, "s0") == chunks(*range(9))


def test_a_full_server_is_one_line_and_the_store_stays_whole(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", tmp_path], check=True)
    server = None
    try:
        server = Seaweed(folder=tmp_path)
        server.bucket("full")
        store = Store.create(S3("full", endpoint=server.endpoint, attempts=1))
        write(store, "one", chunks(*range(9)))
        fill(tmp_path / "filler")
        with pytest.raises(StoreError) as caught:
            write(store, "two", chunks(*range(9, 400)))
        # It does not say that it is full: all we learn is that it failed.
        assert "InternalError" in str(caught.value)
        assert "\n" not in str(caught.value)
        (tmp_path / "filler").unlink()
        assert_whole(store)
        write(store, "three", chunks(*range(9, 40)))
        assert_whole(store)
        assert_no_garbage(store)
    finally:
        if server is not None:
            server.stop()
        subprocess.run(["umount", tmp_path], check=True)


def fill(file: Path) -> None:
    """Leave no room on a file system."""
    with file.open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
