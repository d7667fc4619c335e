"""The same store in a bucket: servers that speak S3, their refusals, and their death."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from tests.support.bucket import CREDENTIALS, Moto, Server
from tests.support.storing import assert_no_garbage, assert_whole, chunks, gc, read, write
from vmckpt.errors import NotInStore, StoreError, StoreFull
from vmckpt.store.backend import s3
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.backend.s3 import S3
from vmckpt.store.repository import Store
from vmckpt.units import Seconds


@pytest.fixture(scope="module", autouse=True)
def credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in CREDENTIALS.items():
            patch.setenv(key, value)
        yield


@pytest.fixture(scope="module")
def server(s3_server: Server) -> Server:
    s3_server.bucket("snapshots")
    return s3_server


@pytest.fixture
def backend(server: Server, request: pytest.FixtureRequest) -> S3:
    backend = backend_of(f"s3://snapshots/{request.node.originalname}?endpoint={server.endpoint}")
    assert isinstance(backend, S3)
    return backend


def test_a_store_lives_in_a_bucket(backend: S3) -> None:
    store = Store.create(backend)
    write(store, "one", chunks(*range(9)), parallel=2)
    write(store, "two", chunks(0, 4, 20))
    assert write(store, "three", chunks(0, 1, 2)).chunks_new == 0
    store.pin("two")
    assert store.pins() == {"two"}
    assert_whole(store)

    store.delete("one")
    store.delete("three")
    assert_no_garbage(store)
    assert_whole(store)
    assert read(Store.open(backend), "two") == chunks(0, 4, 20)


def test_objects_and_parts_of_them(backend: S3) -> None:
    assert backend.put("a/b", b"0123456789")
    assert not backend.put("a/b", b"other")
    assert backend.get("a/b") == b"0123456789"
    assert backend.put("a/b", b"abcdefghij", replace=True)
    assert [backend.get("a/b", 2, 3), backend.get("a/b", 8, 9), backend.get("a/b", 99, 1)] == [
        b"cde", b"ij", b"",
    ]  # fmt: skip
    assert backend.get("a/b", 5) == b"fghij"
    assert backend.put("a/c", b"another one")
    assert [(one.key, one.size) for one in backend.keys("a/")] == [("a/b", 10), ("a/c", 11)]
    assert [one.key for one in backend.keys("a/b")] == ["a/b"]
    assert list(backend.keys("a")) == []
    backend.delete("a/b")
    backend.delete("a/b")
    with pytest.raises(NotInStore, match="has no a/b"):
        backend.get("a/b")


def test_large_objects_go_in_parts(backend: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_PART", 5 << 20)
    data = bytes(range(256)) * (48 << 10)

    assert backend.put("large", data)
    assert not backend.put("large", data + b"x")
    assert backend.get("large") == data
    assert list(backend.leftovers()) == []


def test_what_an_upload_left_is_cleared(backend: S3) -> None:
    store = Store.create(backend)
    backend._client.create_multipart_upload(Bucket="snapshots", Key=backend._name("packs/x"))
    assert len(list(backend.leftovers())) == 1

    assert gc(store, life=0.0).leftovers == 1
    assert list(backend.leftovers()) == []


def test_what_is_wrong_is_one_line(server: Server) -> None:
    with pytest.raises(StoreError, match=r"s3://nowhere: no such bucket; create the bucket first"):
        Store.create(S3("nowhere", endpoint=server.endpoint))
    with pytest.raises(NotInStore, match="s3://snapshots/empty is not a store; create one"):
        Store.open(S3("snapshots", "empty", endpoint=server.endpoint))
    with pytest.raises(StoreError, match="s3://b"):
        S3("b", endpoint="no address")


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("AccessDenied", StoreError, "format: the server refuses access (AccessDenied); check the"),
        ("SignatureDoesNotMatch", StoreError, "check the access key and the bucket's policy"),
        ("QuotaExceeded", StoreFull, "no space left (QuotaExceeded); free some space"),
        ("SlowDown", StoreError, "format: An error occurred (SlowDown)"),
    ],
)
def test_a_servers_refusal_is_told_by_what_it_means(
    backend: S3, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[StoreError], message: str
) -> None:
    def refuse(**_: object) -> None:
        raise ClientError({"Error": {"Code": code}}, "PutObject")

    monkeypatch.setattr(backend._client, "put_object", refuse)
    with pytest.raises(kind) as caught:
        Store.create(backend)
    assert type(caught.value) is kind
    assert message in str(caught.value)


def test_a_server_that_refuses_conditions_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = S3("snapshots", "conditions", endpoint=server.endpoint)

    def put(**_: object) -> object:
        raise ClientError({"Error": {"Code": "NotImplemented"}}, "PutObject")

    monkeypatch.setattr(backend._client, "put_object", put)
    with pytest.raises(StoreError, match=r"at http://127.* ignores If-None-Match.*use a server"):
        backend.put("a", b"1")


def test_that_a_server_keeps_what_is_there_is_tried_once_and_leaves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = S3("snapshots", "tried", endpoint=server.endpoint)
    named: list[str] = []
    real = backend._client.put_object

    def put(**arguments: object) -> object:
        named.append(str(arguments["Key"]))
        return real(**arguments)

    monkeypatch.setattr(backend._client, "put_object", put)
    assert [backend.put(key, b"1") for key in ("a", "b", "a")] == [True, True, False]
    assert sum("/probe-" in name for name in named) == 2
    told = backend._client.list_objects_v2(Bucket="snapshots", Prefix="tried/")
    assert [one["Key"] for one in told["Contents"]] == ["tried/a", "tried/b"]


def test_without_an_access_key_the_mend_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    for key in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(key, str(tmp_path / "none"))
    with pytest.raises(StoreError, match="no complete access key found; set AWS_ACCESS_KEY_ID"):
        Store.create(S3("snapshots", endpoint=server.endpoint))


def test_a_server_that_dies_is_told_at_once_by_whoever_works() -> None:
    server = Moto()
    try:
        server.bucket("short")
        backend = S3("short", endpoint=server.endpoint, attempts=1, patience=Seconds(2.0))
        store = Store.create(backend)
        write(store, "one", chunks(1))
        server.stop()

        for work in (
            lambda: Store.open(backend), lambda: write(store, "two", chunks(2)),
            lambda: read(store, "one"), lambda: gc(store), lambda: store.delete("one"),
        ):  # fmt: skip
            with pytest.raises(
                StoreError, match=r"s3://short: .*no answer: .*; check that the server is running"
            ):
                work()
    finally:
        server.stop()
