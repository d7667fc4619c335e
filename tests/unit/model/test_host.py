"""Where other hosts reach a host."""

from dataclasses import replace

import pytest

from tests.support.builders import HOST
from vmckpt.model.host import Host


@pytest.mark.parametrize(
    ("host", "uri", "address"),
    [
        (HOST, "qemu+tcp://alpha/system", "alpha"),
        (replace(HOST, ssh=None), "qemu+tcp://alpha/system", None),
        (replace(HOST, migration_address="10.0.0.1"), "qemu+tcp://alpha/system", "10.0.0.1"),
        (replace(HOST, peer_uri="qemu+ssh://inside/system"), "qemu+ssh://inside/system", "alpha"),
    ],
)
def test_what_is_set_for_peers_goes_before_what_we_use_ourselves(
    host: Host, uri: str, address: str | None
) -> None:
    assert host.uri_for_peers == uri
    assert host.address_for_peers == address
