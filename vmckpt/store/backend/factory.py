"""From what an operator calls a store to the back end that keeps it."""

import os
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from vmckpt.errors import BadInput
from vmckpt.store.backend.base import Backend
from vmckpt.store.backend.local import LocalFolder

_EXAMPLE = "write s3://bucket/prefix?endpoint=https://host:9000&region=name"


def backend_of(place: str | Path) -> Backend:
    """A folder, or s3://bucket/prefix with its endpoint. Raises BadInput."""
    if not isinstance(place, str) or "://" not in place:
        return LocalFolder(Path(os.path.abspath(Path(place).expanduser())))  # noqa: PTH100
    try:
        parts = urlsplit(place)
        asked = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError as exc:
        raise BadInput(f"{place} is no place for a store: {exc}", hint=_EXAMPLE) from exc
    if parts.scheme != "s3":
        raise BadInput(f"{place}: a store is a folder or s3://", hint=_EXAMPLE)
    if not parts.netloc or set(asked) - {"endpoint", "region"}:
        raise BadInput(f"{place} is no place for a store", hint=_EXAMPLE)
    # Only who keeps a store there pays for loading the client.
    from vmckpt.store.backend.s3 import S3  # noqa: PLC0415

    first = {key: values[0] for key, values in asked.items()}
    return S3(
        parts.netloc, parts.path.strip("/"),
        endpoint=first.get("endpoint"), region=first.get("region"),
    )  # fmt: skip
