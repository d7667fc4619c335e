import os
import socket
from pathlib import Path

import pytest

from tests.support.shell import Shell
from vmckpt.errors import RemoteError
from vmckpt.remote import target_probe

ANSWER = """address 10.0.0.11
address fd00::2
nonlocal 0
port 170C
port 0016
default 2048
pages 2048 10 4 6 1
pages 1048576 0 0 0 0
end
"""


def test_the_answer_of_a_host_is_read() -> None:
    found = target_probe.parse(ANSWER, "beta")

    assert found.addresses == {"10.0.0.11", "fd00::2"}
    assert not found.any_address
    assert found.ports == {5900, 22}
    assert found.free_pages == {2048: (10 - 4 + 6 - 1) * 2 << 20, 1048576: 0}
    assert found.default_page == 2048


@pytest.mark.parametrize(
    "text",
    ["", ANSWER.replace("end\n", ""), ANSWER.replace("170C", "170C; rm"),
     ANSWER.replace("pages 2048 10", "pages 2048 -1")],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(RemoteError, match="beta: looking at addresses and ports: invalid answer"):
        target_probe.parse(text, "beta")


async def test_this_machine_names_its_ports_and_addresses(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = await target_probe.look_at_target(Shell(tmp_path))

        assert server.getsockname()[1] in found.ports
    assert "127.0.0.1" in found.addresses


async def test_what_is_no_block_device_has_no_identity(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    paths = [str(tmp_path / "file"), str(tmp_path / "pipe"), str(tmp_path / "none"), "/dev/null"]

    found = await target_probe.device_identities(Shell(tmp_path), paths)
    assert found == dict.fromkeys(paths)
    assert await target_probe.device_identities(Shell(tmp_path), []) == {}
