"""What people are shown of an address that pages are posted to."""

import pytest

from vmckpt.model.webhook import Webhook


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:secret@hooks.example.org:8443/T0/B1/token?key=1", "hooks.example.org"),
        ("http://[::1]:9000/x", "::1"),
        ("nonsense", "?"),
    ],
)
def test_only_the_host_is_shown(url: str, shown: str) -> None:
    assert Webhook(url=url).shown == shown
