"""Asking a running agent over its socket."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.staging import in_memory
from vmckpt.errors import RemoteError
from vmckpt.replication import control_socket
from vmckpt.replication.control_socket import SOCKET, Control, ask
from vmckpt.units import Seconds


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    with in_memory() as made:
        yield made


def echo(told: Mapping[str, Any]) -> dict[str, Any]:
    return {"heard": dict(told)}


def raw(folder: Path, data: bytes) -> bytes:
    """What an agent answers to these bytes."""
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(5.0)
        asker.connect(str(folder / SOCKET))
        asker.sendall(data)
        asker.shutdown(socket.SHUT_WR)
        return asker.recv(1 << 16)


def test_an_agent_answers_as_often_as_it_is_asked(folder: Path) -> None:
    with Control(folder, echo):
        for wish in ("end", "planned", "ü\n"):
            assert ask(folder, {"wish": wish}) == {"heard": {"wish": wish}}


def test_a_long_answer_arrives_whole(folder: Path) -> None:
    with Control(folder, lambda _: {"much": "x" * 500_000}):
        assert len(ask(folder, {})["much"]) == 500_000


def test_only_its_owner_may_ask(folder: Path) -> None:
    with Control(folder, echo):
        assert (folder / SOCKET).stat().st_mode & 0o777 == 0o600


def test_without_an_agent_nobody_answers(folder: Path) -> None:
    with pytest.raises(RemoteError, match="no agent answers"):
        ask(folder, {})
    with Control(folder, echo):
        pass
    assert not (folder / SOCKET).exists()
    with pytest.raises(RemoteError, match="no agent answers"):
        ask(folder, {})


def test_a_socket_that_a_dead_agent_left_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / SOCKET))
    with Control(folder, echo):
        assert ask(folder, {}) == {"heard": {}}


@pytest.mark.parametrize(
    "data", [b"\n", b"no json\n", b"\xff\n", b'{"cut', b"", b"7\n", b"[" * 100_000 + b"\n"]
)
def test_nonsense_is_no_question_and_harms_nobody(folder: Path, data: bytes) -> None:
    with Control(folder, echo):
        assert raw(folder, data) == b""
        assert ask(folder, {"a": 1}) == {"heard": {"a": 1}}


def test_who_asks_and_says_nothing_is_waited_for_no_longer_than_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "_CLIENT", Seconds(0.05))
    with Control(folder, echo), socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(folder / SOCKET))
        assert ask(folder, {}, Seconds(5.0)) == {"heard": {}}


def test_an_agent_that_hangs_is_told_within_the_limit(folder: Path) -> None:
    go_on = threading.Event()

    def hang(_: Mapping[str, Any]) -> dict[str, Any]:
        go_on.wait(10.0)
        return {}

    with Control(folder, hang):
        with pytest.raises(RemoteError, match="no agent answers"):
            ask(folder, {}, Seconds(0.05))
        go_on.set()


@pytest.mark.parametrize("answer", [[], "x", None])
def test_an_answer_that_is_no_object_is_nonsense(folder: Path, answer: Any) -> None:
    with Control(folder, lambda _: answer), pytest.raises(RemoteError, match="invalid answer"):
        ask(folder, {})


def test_an_answer_that_is_no_json_is_told(folder: Path) -> None:
    def serve() -> None:
        asker, _ = server.accept()
        with asker:
            asker.recv(1 << 16)
            asker.sendall(json.dumps({"a": 1})[:4].encode())

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / SOCKET))
        server.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RemoteError, match="no agent answers"):
            ask(folder, {})
        thread.join()
