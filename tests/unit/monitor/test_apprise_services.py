"""Alerts to the services of an Apprise file, with the real library and a local web server."""

import asyncio
import io
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.alert_receivers import Receiver, page, serving, until
from vmckpt.errors import BadInput
from vmckpt.monitor import apprise_services
from vmckpt.monitor.alerts import State
from vmckpt.monitor.apprise_services import AppriseService, load
from vmckpt.monitor.delivery import NotDelivered, Poster

pytestmark = [
    pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning"),
]
"""Of the library's plugins."""


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    async with serving(found):
        yield found


def written(folder: Path, text: str) -> Path:
    file = folder / "apprise.conf"
    file.write_text(text)
    file.chmod(0o600)
    return file


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What --verbose would show. pytest's caplog also takes records that reach no such handler."""
    text, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)


def services(folder: Path, text: str) -> Any:
    return load(written(folder, text))


async def test_an_alert_arrives_at_each_service(receiver: Receiver, tmp_path: Path) -> None:
    both = f"# on call\njson://127.0.0.1:{receiver.port}/a\nform=json://127.0.0.1:{receiver.port}/b"
    found = services(tmp_path, both)
    assert [one.shown for one in found] == ["apprise JSON (1)", "apprise JSON (2)"]
    warned: list[str] = []
    for one in found:
        poster = Poster(one, warned.append)
        poster.start()
        poster.post(page("web1 has failed over to beta", guest="web1"))
        poster.post(page("alpha is silent", State.FIRING, "host alpha"))
        poster.post(page("alpha is silent", State.RESOLVED, "host alpha"))
        await poster.close()
    assert warned == []
    assert [request.path for _, request in receiver.taken] == ["/a"] * 3 + ["/b"] * 3
    told = [(body["title"], body["message"], body["type"]) for body, _ in receiver.taken[:3]]
    assert told == [
        ("vmckpt: web1", "web1 has failed over to beta\nlook", "warning"),
        ("vmckpt: firing: host alpha", "alpha is silent\nlook", "failure"),
        ("vmckpt: resolved: host alpha", "alpha is silent", "success"),
    ]


async def test_the_yaml_form_is_read(receiver: Receiver, tmp_path: Path) -> None:
    (one,) = services(tmp_path, f"urls:\n  - json://127.0.0.1:{receiver.port}/x\n")
    await one.deliver(page("it is broken"))
    assert receiver.taken[0][0]["message"] == "it is broken\nlook"


async def test_a_service_that_refuses_is_retried(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vmckpt.monitor.delivery.wait_exponential_jitter", lambda *_: lambda _: 0.0)
    receiver.answers = [500]
    warned: list[str] = []
    (one,) = services(tmp_path, f"json://127.0.0.1:{receiver.port}")
    poster = Poster(one, warned.append)
    poster.start()
    poster.post(page("it is broken"))
    await until(lambda: len(receiver.taken) == 1)
    await poster.close()
    assert warned == ["apprise JSON (1): an alert could not be delivered; retrying"]


class Hanging:
    """A service that does not answer for a while, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.asked, self.error = threading.Event(), 0, error

    def notify(self, **_: str) -> bool:
        self.asked += 1
        if self.error:
            raise self.error
        return self.go.wait(30)


async def test_a_service_that_hangs_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apprise_services, "_ANSWER", 0.05)
    hanging = Hanging()
    one = AppriseService(hanging, "Hanging")
    with pytest.raises(TimeoutError):
        await one.deliver(page("it is broken"))
    # Threads do not pile up behind it.
    with pytest.raises(NotDelivered, match="the previous attempt is still waiting"):
        await one.deliver(page("it is broken"))
    assert hanging.asked == 1
    hanging.go.set()
    await asyncio.sleep(0.05)
    await one.deliver(page("it is broken"))
    assert hanging.asked == 2


async def test_an_error_of_the_library_shows_no_url() -> None:
    one = AppriseService(Hanging(RuntimeError("json://T0K3N@x")), "Odd")
    with pytest.raises(NotDelivered, match=r"^RuntimeError$"):
        await one.deliver(page("it is broken"))


async def test_the_library_has_time_limits(receiver: Receiver, tmp_path: Path) -> None:
    receiver.silent = True
    (one,) = services(tmp_path, f"json://127.0.0.1:{receiver.port}?rto=0.2&cto=0.2")
    began = time.monotonic()
    with pytest.raises(NotDelivered):
        await one.deliver(page("it is broken"))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "nonsense://T0K3N",
        "json://good/\nhttps://eve:T0K3N@\n",
        "urls:\n  - T0K3N:",
    ],
)
def test_a_file_that_is_wrong_is_refused_without_its_content(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], logged: io.StringIO
) -> None:
    with pytest.raises(BadInput, match=r"apprise.conf: .* found by Apprise; the URLs are not") as e:
        services(tmp_path, text)
    assert "T0K3N" not in str(e.value)
    assert "T0K3N" not in "".join(capfd.readouterr())
    assert "T0K3N" not in logged.getvalue()


async def test_no_url_is_logged(
    receiver: Receiver, tmp_path: Path, capfd: pytest.CaptureFixture[str], logged: io.StringIO
) -> None:
    """Not even with --verbose."""
    refused = services(tmp_path, "json://eve:T0K3N@127.0.0.1:1/T0K3N")
    accepted = services(tmp_path, f"json://eve:T0K3N@127.0.0.1:{receiver.port}/T0K3N")
    one, other = refused[0], accepted[0]
    with pytest.raises(NotDelivered):
        await one.deliver(page("it is broken"))
    await other.deliver(page("it is broken"))
    assert "T0K3N" not in "".join(capfd.readouterr()) + logged.getvalue()
    assert "T0K3N" not in one.shown


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "json://x").chmod(0o644)
    with pytest.raises(BadInput, match="other users can access Apprise URLs"):
        load(tmp_path / "apprise.conf")


def test_without_the_library_the_hint_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(BadInput, match="needs the Python package apprise; install it"):
        services(tmp_path, "json://x")
