"""Choose the backend for a store's path or URL."""

import os
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from vmckpt.errors import BadInput
from vmckpt.store.backend.base import Backend
from vmckpt.store.backend.local import LocalFolder

_EXAMPLE = "use s3://bucket/prefix?endpoint=https://host:9000&region=name"


def backend_of(place: str | Path) -> Backend:
    """Return the backend for a directory or an s3://bucket/prefix URL. Raises BadInput, StoreError.

    The URL's query may contain `endpoint` and `region`.
    """
    if not isinstance(place, str) or "://" not in place:
        return LocalFolder(Path(os.path.abspath(Path(place).expanduser())))  # noqa: PTH100
    try:
        parts = urlsplit(place)
        asked = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError as exc:
        raise BadInput(f"{place} is not a valid store URL: {exc}", hint=_EXAMPLE) from exc
    if parts.scheme != "s3":
        raise BadInput(f"{place}: a store must be a directory or an s3:// URL", hint=_EXAMPLE)
    if not parts.netloc or set(asked) - {"endpoint", "region"}:
        raise BadInput(f"{place} is not a valid store URL", hint=_EXAMPLE)
    # Importing the S3 client is slow, so it is imported only for S3 stores.
    from vmckpt.store.backend.s3 import S3  # noqa: PLC0415

    first = {key: values[0] for key, values in asked.items()}
    return S3(
        parts.netloc, parts.path.strip("/"),
        endpoint=first.get("endpoint"), region=first.get("region"),
    )  # fmt: skip
