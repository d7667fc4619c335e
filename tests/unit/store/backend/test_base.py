"""Names of objects in a store."""

import pytest

from vmckpt.errors import BadInput
from vmckpt.store.backend.base import checked


@pytest.mark.parametrize("key", ["", "/a", "a/", "../a", "a/../b", "a//b", ".a", "a/b/c/d/e", "ä"])
def test_a_key_is_no_way_out_of_the_store(key: str) -> None:
    with pytest.raises(BadInput, match="is not a valid object key"):
        checked(key)
