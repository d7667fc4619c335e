"""Alerts as a webhook receives them, and the secrets of receivers."""

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.alert_receivers import Receiver, page, serving
from tests.support.following import take
from vmckpt.errors import BadInput
from vmckpt.model.webhook import Webhook
from vmckpt.monitor.delivery import Poster
from vmckpt.monitor.webhooks import SIGNATURE, WebhookReceiver, read_private, signature


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    async with serving(found):
        yield found


async def test_pages_arrive_signed_and_in_their_order(receiver: Receiver, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    warned: list[str] = []
    poster = Poster(WebhookReceiver(Webhook(url=receiver.url, secret_file=secret)), warned.append)
    poster.start()
    for number in range(5):
        poster.post(page(f"page {number}"))
    await poster.close()

    assert [body["text"] for body, _ in receiver.taken] == [f"page {n}" for n in range(5)]
    signed = [request.headers[SIGNATURE] for _, request in receiver.taken]
    assert signed == [signature(b"s3cret", body) for body in receiver.bodies]
    assert all(one.startswith("sha256=") for one in signed)
    assert warned == []


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot read a webhook's secret"), ("\n", "is empty")]
)
def test_a_secret_that_is_none_is_said(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadInput, match=said):
        WebhookReceiver(Webhook(url="http://127.0.0.1:1/", secret_file=file))


def test_a_private_file_is_read_only_if_it_is_private(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.write_text("json://x")
    file.chmod(0o600)
    assert read_private(file, "URLs") == "json://x"
    for mode in (0o640, 0o604, 0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(BadInput, match=r"other users can access URLs .*; run chown root"):
            read_private(file, "URLs")


def test_the_owner_that_is_proposed_is_the_user_that_reads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "urls"
    file.touch(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(BadInput) as caught:
        read_private(file, "URLs")
    assert caught.value.hint == f"run chown 1234 {file} and chmod 600 {file}"


def test_a_file_of_another_user_is_not_private(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.touch(0o600)
    os.chown(file, 65534, 65534)
    with pytest.raises(BadInput, match="other users can access URLs"):
        read_private(file, "URLs")


def test_what_is_no_file_or_no_text_is_refused(tmp_path: Path) -> None:
    fifo, folder, binary = tmp_path / "fifo", tmp_path / "folder", tmp_path / "binary"
    os.mkfifo(fifo, 0o600)
    folder.mkdir(0o700)
    binary.write_bytes(b"\xff")
    binary.chmod(0o600)
    for path, told in (
        (fifo, "is not a file"), (folder, "is not a file|Is a directory"),
        (binary, "not UTF-8"), (tmp_path / "none", "No such file"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=told):
            read_private(path, "URLs")


def test_a_file_that_others_can_access_is_read_after_the_commands(tmp_path: Path) -> None:
    file = tmp_path / "secret of receivers"
    file.write_text("s3cret\n")
    file.chmod(0o644)
    with pytest.raises(BadInput) as caught:
        read_private(file, "URLs")
    for command in take(str(caught.value)):
        subprocess.run(command.words, check=True)
    assert read_private(file, "URLs") == "s3cret\n"
