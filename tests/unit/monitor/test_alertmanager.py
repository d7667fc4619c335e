"""An Alertmanager that is kept informed, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Collection
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.alert_receivers import AlertmanagerServer, page, serving, until
from vmckpt.errors import BadInput
from vmckpt.model.webhook import AlertmanagerPlace
from vmckpt.monitor import active_alerts, alertmanager
from vmckpt.monitor.active_alerts import ActiveAlert
from vmckpt.monitor.alertmanager import Alertmanager
from vmckpt.monitor.alerts import State


@pytest_asyncio.fixture
async def server() -> AsyncIterator[AlertmanagerServer]:
    found = AlertmanagerServer()
    async with serving(found):
        yield found


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest_asyncio.fixture
async def client(server: AlertmanagerServer, warned: list[str]) -> AsyncIterator[Alertmanager]:
    made = Alertmanager(AlertmanagerPlace(url=server.at("/")), warned.append)
    made.start()
    yield made
    await made.close()


def firing(*keys: str) -> Collection[ActiveAlert]:
    return [active_alerts.of_page(page(f"{key}: it is broken", State.FIRING, key)) for key in keys]


async def test_alerts_fire_and_are_resolved(
    server: AlertmanagerServer, client: Alertmanager, warned: list[str]
) -> None:
    client.show(firing("host alpha", "store near"))
    await until(lambda: server.active == ["host alpha", "store near"])
    client.show(firing("store near"))
    await until(lambda: server.active == ["store near"])
    client.show([])
    await until(lambda: server.active == [])
    assert warned == []
    assert server.taken[0][1].path == "/api/v2/alerts"


async def test_active_alerts_are_sent_again(
    server: AlertmanagerServer, client: Alertmanager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alertmanager, "_AGAIN", 0.01)
    client.show(firing("host alpha"))
    await until(lambda: server.active == ["host alpha"])
    server.alerts.clear()  # it was restarted
    await until(lambda: server.active == ["host alpha"])


async def test_nothing_new_causes_no_request(
    server: AlertmanagerServer, client: Alertmanager
) -> None:
    client.show([])
    client.show(firing("host alpha"))
    await until(lambda: server.asked == 1)
    for _ in range(20):
        client.show(firing("host alpha"))
        await asyncio.sleep(0.005)
    assert server.asked == 1


@pytest.mark.parametrize("status", [500, 400, 302])
async def test_a_request_that_fails_is_repeated_with_the_state_of_then(
    server: AlertmanagerServer, client: Alertmanager, warned: list[str], status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(alertmanager, "_FIRST_RETRY", 0.01)
    server.answers = [status, status, status]
    client.show(firing("host alpha"))
    await until(lambda: server.asked > 0)
    client.show(firing("store near"))
    await until(lambda: server.active == ["store near"])
    assert warned == [
        f"Alertmanager 127.0.0.1: alerts could not be delivered; retrying: HTTP status {status}"
    ]


async def test_another_service_that_reports_is_not_disturbed(
    server: AlertmanagerServer, client: Alertmanager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alertmanager, "_AGAIN", 0.01)
    client.show(firing("host alpha"))
    await until(lambda: server.active == ["host alpha"])
    client.show(None)
    await asyncio.sleep(0.05)
    asked = server.asked
    await asyncio.sleep(0.05)
    assert (server.asked, server.active) == (asked, ["host alpha"])  # not resolved by this service


async def test_the_end_sends_what_is_new(server: AlertmanagerServer, warned: list[str]) -> None:
    made = Alertmanager(AlertmanagerPlace(url=server.at("")), warned.append)
    made.start()
    made.show(firing("host alpha"))
    await made.close()
    assert (server.active, warned) == (["host alpha"], [])


@pytest.mark.parametrize("silent", [True, False])
async def test_the_end_waits_for_no_alertmanager(
    server: AlertmanagerServer, warned: list[str], silent: bool
) -> None:
    server.silent = True
    url = server.at("") if silent else "http://127.0.0.1:1"  # no process listens on port 1
    made = Alertmanager(AlertmanagerPlace(url=url), warned.append)
    made.start()
    made.show(firing("host alpha"))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await made.close(limit=0.1)
    assert warned[-1:] in (["Alertmanager 127.0.0.1: 1 alert not delivered"], [])
    assert silent or warned


async def test_it_logs_in(server: AlertmanagerServer, warned: list[str], tmp_path: Path) -> None:
    server.login = "vmckpt:pässword".encode()
    file = tmp_path / "password"
    file.write_text("pässword\n")
    file.chmod(0o600)
    place = AlertmanagerPlace(url=server.at(""), username="vmckpt", password_file=file)
    made = Alertmanager(place, warned.append)
    made.start()
    made.show(firing("host alpha"))
    await until(lambda: server.active == ["host alpha"])
    await made.close()
    assert warned == []

    file.chmod(0o644)
    with pytest.raises(BadInput, match="other users can access the password of an Alertmanager"):
        Alertmanager(place, warned.append)


def grown(what: list[str], before: int) -> bool:
    return len(what) > before


async def test_no_warning_shows_a_secret_in_the_url(warned: list[str]) -> None:
    for url in ("http://eve:T0K3N@127.0.0.1:1/T0K3N", "http://eve:T0K3N@x..y/T0K3N"):
        made = Alertmanager(AlertmanagerPlace(url=url), warned.append)
        made.start()
        made.show(firing("host alpha"))
        await until(partial(grown, warned, len(warned)))
        await made.close(limit=0.1)
    assert not [one for one in warned if "T0K3N" in one]
