"""Texts that every database and every JSON document can hold."""

import os

from vmckpt.util.unicode_text import encodable


def test_only_what_cannot_be_encoded_is_replaced() -> None:
    name = os.fsdecode(b"web\xff1")

    assert encodable(name) == "web?1"
    assert encodable("Straße 東京 \U0001f600") == "Straße 東京 \U0001f600"
