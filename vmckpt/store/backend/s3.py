"""A store in a bucket of an S3-compatible object store.

S3 writes objects atomically. A conditional write (If-None-Match) does not overwrite an existing
object. The client retries failed requests, and raises an error if the retries fail too.
"""

import contextlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from vmckpt.errors import NotInStore, StoreError, StoreFull
from vmckpt.store.backend.base import Data, Stored, checked, full_hint, is_key
from vmckpt.units import Seconds

_PART = 32 << 20
"""Size in bytes. An object larger than two parts is uploaded in parts of at least this size."""
_MOST_PARTS = 10_000
_GONE = {"NoSuchKey", "404", "NotFound", "NoSuchUpload"}
_THERE = {"PreconditionFailed", "412"}
_LATER = {"ConditionalRequestConflict", "OperationAborted", "409"}
_FULL = {
    "QuotaExceeded", "InsufficientStorage", "507", "XMinioStorageFull", "EntityTooLarge",
    "XMinioBackendQuotaExceeded", "ServiceQuotaExceeded",
}  # fmt: skip
_REFUSED = {
    "AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled",
    "ExpiredToken", "InvalidToken", "MethodNotAllowed",
}  # fmt: skip
_BUSY = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "500", "502", "503", "504",
}  # fmt: skip
_NO_CONDITIONS = {"NotImplemented", "501"}


class S3:
    """A store below a prefix of a bucket."""

    def __init__(
        self, bucket: str, prefix: str = "", *,
        endpoint: str | None = None, region: str | None = None,
        patience: Seconds = Seconds(60.0), attempts: int = 5,
    ) -> None:  # fmt: skip
        """Connect to a bucket, with boto3's usual sources of credentials.

        `endpoint` is the server's URL; None: Amazon. `patience` is the read timeout of a request in
        seconds. `attempts` is the maximum number of attempts per request. Raises StoreError.
        """
        self.where = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._prefix = bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        config = Config(
            connect_timeout=min(10.0, patience),
            read_timeout=patience,
            retries={"mode": "standard", "max_attempts": attempts},
            max_pool_connections=16,
        )
        self._keeps = False
        """Whether a test has shown that the server keeps an existing object on If-None-Match."""
        with self._explained(""):
            # boto3's default session would keep using the first credentials that it found.
            self._client: Any = boto3.session.Session().client(
                "s3", endpoint_url=endpoint, region_name=region, config=config
            )

    def put(self, key: str, data: Data, *, replace: bool = False) -> bool:
        if not replace and not self._keeps:
            self._must_keep_what_is_there(key)
        if len(data) > 2 * _PART:
            view = memoryview(data).cast("B")
            part = max(_PART, -(-len(view) // _MOST_PARTS))
            parts = (view[at : at + part] for at in range(0, len(view), part))
            return self._in_parts(key, parts, replace=replace)
        with self._explained(key):
            return self._unless_there(
                replace, self._client.put_object, Key=self._name(key), Body=bytes(data)
            )

    def prove_locks(self) -> None:
        self._must_keep_what_is_there("test of If-None-Match")

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        asked = {}
        if offset or length is not None:
            asked["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        with self._explained(key):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key), **asked)
            except ClientError as exc:
                if _code(exc) in {"InvalidRange", "416"}:
                    return b""
                raise
            with contextlib.closing(answer["Body"]) as body:
                return bytes(body.read())

    def keys(self, prefix: str) -> Iterator[Stored]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._name(prefix.rstrip("/")) + "/" * prefix.endswith("/")
        )
        for page in self._pages(pages, prefix):
            for one in page.get("Contents", ()):
                key = str(one["Key"]).removeprefix(self._prefix)
                if key == prefix or (prefix.endswith("/") and is_key(key)):
                    yield Stored(key, int(one["Size"]), Seconds(one["LastModified"].timestamp()))

    def delete(self, key: str) -> None:
        with self._explained(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def leftovers(self) -> Iterator[Stored]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        for page in self._pages(pages, "unfinished uploads"):
            for one in page.get("Uploads", ()):
                begun = Seconds(one["Initiated"].timestamp())
                yield Stored(f"{one['UploadId']} {one['Key']}", 0, begun)

    def clear(self, leftover: str) -> None:
        upload, _, name = leftover.partition(" ")
        with contextlib.suppress(NotInStore), self._explained(name):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload)

    def _in_parts(self, key: str, parts: Iterator[Data], *, replace: bool) -> bool:
        name = self._name(key)
        with self._explained(key):
            upload = self._client.create_multipart_upload(Bucket=self._bucket, Key=name)["UploadId"]
            try:
                told = []
                for number, part in enumerate(parts, 1):
                    answer = self._client.upload_part(
                        Bucket=self._bucket, Key=name, UploadId=upload, PartNumber=number,
                        Body=bytes(part),
                    )  # fmt: skip
                    told.append({"PartNumber": number, "ETag": answer["ETag"]})
                done = self._unless_there(
                    replace, self._client.complete_multipart_upload,
                    Key=name, UploadId=upload, MultipartUpload={"Parts": told},
                )  # fmt: skip
            except BaseException:
                # If the upload cannot be aborted now, a garbage collection removes it later.
                with contextlib.suppress(ClientError, BotoCoreError):
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=name, UploadId=upload
                    )
                raise
            if not done:
                self.clear(f"{upload} {name}")
            return done

    def _unless_there(self, replace: bool, call: Any, **arguments: Any) -> bool:
        """Write an object. Returns False if the object exists and `replace` is not set."""
        if replace:
            call(Bucket=self._bucket, **arguments)
            return True
        for last in (False, False, True):
            try:
                call(Bucket=self._bucket, IfNoneMatch="*", **arguments)
            except ClientError as exc:
                if _code(exc) in _THERE:
                    return False
                if last or _code(exc) not in _LATER:
                    raise
            else:
                return True
        raise AssertionError("the last attempt returns or raises")

    def _must_keep_what_is_there(self, key: str) -> None:
        """Test that the server refuses to overwrite an object, which locks depend on.

        The test is needed because a server that ignores the condition does not report an error.
        Raises StoreError.
        """
        name = f"{self._prefix}probe-{secrets.token_hex(8)}"
        put, written = self._client.put_object, True
        with self._explained(key):
            try:
                for content in (b"first", b"second"):
                    written = self._unless_there(False, put, Key=name, Body=content)
            except ClientError as exc:
                if _code(exc) not in _NO_CONDITIONS:
                    raise
            finally:
                with contextlib.suppress(ClientError, BotoCoreError):
                    self._client.delete_object(Bucket=self._bucket, Key=name)
        if written:
            at = self._client.meta.endpoint_url
            raise StoreError(
                f"{self.where}: the server at {at} ignores If-None-Match and overwrites existing"
                " objects, so locks on this store would not work",
                hint="use a server that supports conditional writes, or update this server",
            )
        self._keeps = True

    def _pages(self, pages: Any, what: str) -> Iterator[Any]:
        each = iter(pages)
        while True:
            with self._explained(what):
                page = next(each, None)
            if page is None:
                return
            yield page

    def _name(self, key: str) -> str:
        return self._prefix + checked(key)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Convert errors of the server and the client to StoreError or one of its subclasses."""
        place = f"{self.where}: {what}" if what else self.where
        try:
            yield
        except ClientError as exc:
            raise self._said_no(_code(exc), exc, what, place) from exc
        except (NoCredentialsError, PartialCredentialsError) as exc:
            raise StoreError(
                f"{self.where}: no complete access key found",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
            ) from exc
        except (BotoCoreError, ValueError, OSError) as exc:
            raise StoreError(
                f"{place}: no answer: {' '.join(str(exc).split())[:160]}",
                hint="check that the server is running and its address is correct",
            ) from exc

    def _said_no(self, code: str, exc: Exception, what: str, place: str) -> StoreError:
        if code == "NoSuchBucket":
            return StoreError(f"{self.where}: no such bucket", hint="create the bucket first")
        if code in _GONE:
            return NotInStore(f"{self.where} has no {what}")
        if code in _FULL:
            return StoreFull(
                f"{place}: no space left ({code})",
                hint=full_hint(what),
            )
        if code in _REFUSED:
            return StoreError(
                f"{place}: the server refuses access ({code})",
                hint="check the access key and the bucket's policy",
            )
        return StoreError(
            f"{place}: {' '.join(str(exc).split())[:160]}",
            hint="try again later" if code in _BUSY else "check the server's log",
        )


def _code(exc: ClientError) -> str:
    return str(exc.response.get("Error", {}).get("Code", ""))
