"""What an operator calls a store."""

from pathlib import Path

import pytest

from vmckpt.errors import BadInput
from vmckpt.store.backend.factory import backend_of


def test_a_place_is_a_folder_or_a_bucket(tmp_path: Path) -> None:
    assert backend_of(tmp_path).where == str(tmp_path)
    assert backend_of("s3://b/p/q?endpoint=http://127.0.0.1:1&region=x").where == "s3://b/p/q"
    for wrong in ("http://b/p", "s3:///p", "s3://b?port=3", "s3://b?x"):
        with pytest.raises(
            BadInput, match=r"endpoint=https://host:9000|a store must be a directory"
        ):
            backend_of(wrong)
