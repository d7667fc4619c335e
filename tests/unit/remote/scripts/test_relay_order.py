import os
import socket
import threading
from pathlib import Path

from vmckpt.remote.scripts import relay_order


def test_a_directory_of_another_user_or_for_everybody_is_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir(mode=0o700)
    assert relay_order.is_ours(str(folder))
    (tmp_path / "link").symlink_to(folder)
    assert not relay_order.is_ours(str(tmp_path / "link"))
    folder.chmod(0o770)
    assert not relay_order.is_ours(str(folder))
    folder.chmod(0o700)
    os.chown(folder, 65534, 65534)
    assert not relay_order.is_ours(str(folder))
    assert not relay_order.is_ours(str(tmp_path / "none"))


def test_nothing_is_passed_to_an_agent_that_does_not_accept(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        heard: list[tuple[bytes, list[int]]] = []

        def refuse() -> None:
            line, _ = listener.accept()
            with line:
                message, descriptors, _, _ = socket.recv_fds(line, 1 << 18, 3)
                heard.append((message, descriptors))

        thread = threading.Thread(target=refuse)
        thread.start()
        assert relay_order.relay(["a", "b"], path=path) == relay_order.NONE
        thread.join()
    ((message, descriptors),) = heard
    assert message.startswith(b"a\0b\0\0")
    assert descriptors == []
    assert relay_order.relay(["a"], path=path) == relay_order.NONE  # refused
