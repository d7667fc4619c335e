"""A real Alertmanager takes the alerts, resolves them, and checks the password."""

import asyncio
import json
import shutil
import socket
import subprocess
import urllib.request
from base64 import b64encode
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from tests.support.alert_receivers import page, until
from tests.support.paths import ROOT
from vmckpt.model.webhook import AlertmanagerPlace
from vmckpt.monitor import active_alerts, alertmanager
from vmckpt.monitor.active_alerts import ActiveAlert
from vmckpt.monitor.alertmanager import Alertmanager
from vmckpt.monitor.alerts import State

CONFIG = "route: {receiver: none}\nreceivers: [{name: none}]\n"
PASSWORD = "pässword"
TOOLS = str(ROOT / ".tools")
IN_A_VIEW = """
if [ -d "$0/usr/share/prometheus" ]; then
    mount -t overlay overlay -o lowerdir="$0/usr/share":/usr/share /usr/share || exit
fi
exec "$@"
"""
"""Debian's Alertmanager needs its templates in /usr/share, and here it is only unpacked."""


class Server:
    """An Alertmanager with a user, on a port of its own."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("prometheus-alertmanager", path=f"{TOOLS}/usr/bin:/usr/bin")
        assert program is not None, "./check --install fetches it"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
        (folder / "config.yml").write_text(CONFIG)
        (folder / "web.yml").write_text(f"basic_auth_users: {{vmckpt: '{hashed}'}}\n")
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", IN_A_VIEW, TOOLS, program,
             "--config.file=config.yml", "--web.config.file=web.yml", "--storage.path=data",
             f"--web.listen-address={self.url.removeprefix('http://')}",
             "--cluster.listen-address="],
            cwd=folder, stdout=self.log, stderr=self.log,
        )  # fmt: skip

    def asked(self, path: str) -> Any:
        login = b64encode(f"vmckpt:{PASSWORD}".encode()).decode()
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Basic {login}"}
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read())

    def ready(self) -> bool:
        try:
            return bool(self.asked("/api/v2/status"))
        except OSError:
            assert self.process.poll() is None
            return False

    @property
    def active(self) -> list[str]:
        found = self.asked("/api/v2/alerts?active=true")
        return sorted(one["labels"]["key"] for one in found)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.end()


def firing(*keys: str) -> Collection[ActiveAlert]:
    return [active_alerts.of_page(page(f"{key}: broken", State.FIRING, key)) for key in keys]


async def shows(server: Server, *keys: str) -> None:
    async with asyncio.timeout(20):
        while await asyncio.to_thread(lambda: server.active) != sorted(keys):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_alerts_are_taken_and_resolved(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alertmanager, "_FIRST_RETRY", 0.05)
    password = tmp_path / "password"
    password.write_text(PASSWORD + "\n")
    password.chmod(0o600)
    warned: list[str] = []
    place = AlertmanagerPlace(url=server.url, username="vmckpt", password_file=password)
    client = Alertmanager(place, warned.append)
    client.start()
    client.show(firing("host alpha", "failed snapshot web1"))
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(server.ready):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await shows(server, "failed snapshot web1", "host alpha")
    (one, _) = await asyncio.to_thread(server.asked, "/api/v2/alerts")
    assert one["labels"]["service"] == "vmckpt"
    assert one["annotations"]["hint"] == "look"
    client.show(firing("failed snapshot web1"))
    await shows(server, "failed snapshot web1")
    client.show([])
    await shows(server)
    await client.close()
    # It was asked before it listened; nothing else went wrong.
    assert len(warned) <= 1

    wrong = Alertmanager(AlertmanagerPlace(url=server.url), warned.append)
    wrong.start()
    wrong.show(firing("host alpha"))
    await until(lambda: any("HTTP status 401" in line for line in warned))
    await wrong.close(limit=1.0)
    assert await asyncio.to_thread(lambda: server.active) == []
