"""vmckpt notify: what each receiver gets, and what is said of one that does not take it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.following import words
from vmckpt.cli import app
from vmckpt.errors import AlertNotDelivered, BadInput

# Of the library's plugins.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")


class Server:
    """Takes everything, except what is posted to /refused."""

    def __init__(self) -> None:
        self.taken: dict[str, Any] = {}
        mine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                mine.taken[self.path] = json.loads(body)
                self.send_response(403 if self.path.startswith("/refused") else 200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


def inventory(folder: Path, receivers: str) -> list[str]:
    path = folder / "hosts.yaml"
    path.write_text("hosts: {alpha: {uri: 'test:///default'}}\n" + receivers)
    return ["--inventory", str(path)]


def test_each_receiver_gets_a_test_alert(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = tmp_path / "apprise.conf"
    urls.write_text(f"json://127.0.0.1:{server.port}/apprise")
    urls.chmod(0o600)
    at = f"http://127.0.0.1:{server.port}"
    where = inventory(
        tmp_path,
        f"webhooks: [{{url: '{at}/hook'}}]\nalertmanagers: [{{url: '{at}'}}]\napprise: {urls}\n",
    )
    assert app.run(["notify", *where]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines] == ["result", "delivered", "delivered", "delivered"]
    assert set(server.taken) == {"/hook", "/apprise", "/api/v2/alerts"}
    assert server.taken["/hook"]["text"] == "this is a test of vmckpt notify"
    (alert,) = server.taken["/api/v2/alerts"]
    assert alert["labels"]["alertname"] == "VmckptTest"
    assert alert["startsAt"] < alert["endsAt"]
    assert server.taken["/apprise"]["message"].startswith("this is a test of vmckpt notify")


def test_a_receiver_that_refuses_is_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = f"http://127.0.0.1:{server.port}"
    where = inventory(
        tmp_path,
        f"webhooks: [{{url: '{at}/hook'}}, {{url: '{at}/refused/T0K3N'}},"
        " {url: 'http://127.0.0.1:1/T0K3N'}]\n"
        f"alertmanagers: [{{url: '{at}/refused/T0K3N'}}]\n",
    )
    assert app.run(["notify", "--json", *where]) == AlertNotDelivered.exit_code == 6
    out, err = capsys.readouterr()
    results = json.loads(out)["receivers"]
    assert [one["delivered"] for one in results] == [True, False, False, False]
    assert results[1] == {
        "receiver": "webhook 127.0.0.1", "delivered": False, "error": "HTTP status 403",
    }  # fmt: skip
    assert "127.0.0.1" in results[2]["receiver"]
    assert results[3]["receiver"] == "Alertmanager 127.0.0.1"
    assert "3 receivers did not accept the test alert: webhook 127.0.0.1, " in err
    assert "T0K3N" not in out + err


def test_a_receiver_accepts_the_alert_after_its_address_was_corrected(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = f"http://127.0.0.1:{server.port}"
    where = inventory(tmp_path, f"webhooks: [{{url: '{at}/refused'}}]\n")
    assert app.run(["notify", *where]) == AlertNotDelivered.exit_code
    inventory(tmp_path, f"webhooks: [{{url: '{at}/hook'}}]\n")
    assert app.run([*words(capsys.readouterr().err)[1:], *where]) == 0
    assert "/hook" in server.taken


def test_without_a_receiver_the_hint_names_the_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["notify", *inventory(tmp_path, "")]) == BadInput.exit_code
    assert "defines no receiver of alerts; add webhooks:, alertm" in capsys.readouterr().err
