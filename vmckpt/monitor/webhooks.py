"""Post alerts to webhooks as signed JSON, and read the secrets of receivers."""

import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from shlex import quote

import aiohttp

from vmckpt.errors import BadInput
from vmckpt.model.webhook import Webhook
from vmckpt.monitor.alerts import Page
from vmckpt.monitor.delivery import NotDelivered

SIGNATURE = "X-Vmckpt-Signature"
_ANSWER = aiohttp.ClientTimeout(total=10.0)
_LARGEST_SECRET = 1 << 20


class WebhookReceiver:
    """A receiver of alerts: one webhook. See delivery.Receiver."""

    def __init__(self, hook: Webhook) -> None:
        """Raises BadInput if the secret cannot be read."""
        self._hook = hook
        self._secret = _secret(hook.secret_file)
        self._session: aiohttp.ClientSession | None = None

    @property
    def shown(self) -> str:
        return f"webhook {self._hook.shown}"

    async def deliver(self, page: Page) -> None:
        body = json.dumps(page.as_json()).encode()
        headers = {} if self._secret is None else {SIGNATURE: signature(self._secret, body)}
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_ANSWER)
        await post(self._session, self._hook.url, body, headers)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]
) -> None:
    """Post JSON, without following redirects.

    Raises NotDelivered if the answer is not 2xx or the connection fails, TimeoutError, OSError, and
    ValueError if the URL is invalid.
    """
    headers = {"Content-Type": "application/json", **headers}
    try:
        async with session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
            if not 200 <= answer.status < 300:
                raise NotDelivered(f"HTTP status {answer.status}")
    except aiohttp.InvalidURL:
        raise ValueError("invalid URL") from None  # its message contains the URL
    except aiohttp.ClientError as exc:
        raise NotDelivered(str(exc) or type(exc).__name__) from exc


def signature(secret: bytes, body: bytes) -> str:
    """Return the HMAC-SHA256 of the body, as "sha256=" and hex digits."""
    return "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()


def _secret(file: Path | None) -> bytes | None:
    if file is None:
        return None
    write = "write a line of random text to that file, readable only by the service"
    try:
        found = file.read_bytes().strip()
    except OSError as exc:
        missing = isinstance(exc, FileNotFoundError)
        raise BadInput(
            f"cannot read a webhook's secret: {file}: {exc.strerror}",
            hint=write if missing else "make the file readable for the user that runs vmckpt",
        ) from None
    if not found:
        raise BadInput(f"{file}: the webhook's secret is empty", hint=write)
    return found


def read_private(path: Path, what: str) -> str:
    """Return the text of a file that root or this process's user owns and no other user can access.

    `what`: the content of the file, for messages. Raises BadInput.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(number, "rb") as file:  # noqa: PTH123 – a descriptor
            seen = os.fstat(number)
            if not stat.S_ISREG(seen.st_mode):
                raise BadInput(f"{path} is not a file; it should contain {what}")
            if seen.st_uid not in (0, os.geteuid()) or seen.st_mode & 0o077:
                owner, name = os.geteuid() or "root", quote(str(path))
                raise BadInput(
                    f"{path}: other users can access {what} (mode {seen.st_mode & 0o777:o})",
                    hint=f"run chown {owner} {name} and chmod 600 {name}",
                )
            return file.read(_LARGEST_SECRET).decode()
    except OSError as exc:
        raise BadInput(f"cannot read {what}: {path}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"cannot read {what}: {path}: not UTF-8") from None
