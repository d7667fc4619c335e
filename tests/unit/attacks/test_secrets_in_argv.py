"""Passwords are on no command line, neither ours nor a child's: every user can read those."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support import postgres
from tests.support.fence_agents import SECRET as FENCE_SECRET
from tests.support.fence_agents import FakeAgent
from tests.support.processes import command_lines, environment
from vmckpt.app.subprocesses import Processes
from vmckpt.errors import Cancelled
from vmckpt.journal import location
from vmckpt.journal.store import Journal
from vmckpt.model.fencing import Action
from vmckpt.protection import start
from vmckpt.remote import fence_agent

SECRET = "geheim7"
VMCKPT = (sys.executable, "-m", "vmckpt.cli.app")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("none", False),
        ("/j/x.db", False),
        ("/j/a:b@c.db", False),
        ("postgresql://u@h/d", False),
        ("postgresql://u@h:5432/d?service=x", False),
        ("postgresql://h:5432/d", False),
        ("postgresql:///d?host=/run/postgresql&passfile=/etc/vmckpt/pgpass", False),
        ("postgresql://u:p@h/d", True),
        ("postgresql://u:@h/d", True),
        ("postgres://u:p@h/d", True),
        ("postgresql://u:p@x@h/d", True),
        ("postgresql://u:1/p@h/d", True),
        ("postgresql://u:p@h1,h2:5433/d", True),
        ("postgresql://h/d?password=p", True),
        ("postgresql://h/d?user=u&password=p", True),
        ("postgresql://h/d?sslpassword=p", True),
        ("host=h password=p", True),
    ],
)
def test_a_password_in_a_place_is_found(text: str, found: bool) -> None:
    assert location.has_password(text) is found


@pytest.mark.parametrize(
    "url", [f"postgresql://u:{SECRET}@h/d", f"postgresql:///d?password={SECRET}"]
)
def test_a_password_on_the_command_line_is_refused(url: str) -> None:
    done = subprocess.run(
        [*VMCKPT, "--journal", url, "jobs"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--journal contains a password, which every user of this machine can read" in line
    assert "~/.pgpass or PGPASSFILE, or put the URL in VMCKPT_JOURNAL" in line
    assert SECRET not in done.stdout + done.stderr


@pytest.fixture
def login(postgresql: postgres.Server) -> Iterator[str]:
    """A place in a database that asks for a password, without it."""
    url = postgresql.place()
    schema = url.rpartition("%3D")[2]
    with postgresql.asking("anna", SECRET):
        postgresql.sql(f"GRANT ALL ON SCHEMA {schema} TO anna")
        yield url.replace("postgres@/", "anna@/")


def test_a_password_comes_from_libpqs_own_file(
    login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text(f"*:*:*:anna:{SECRET}\n")
    file.chmod(0o600)
    Journal(f"{login}&passfile={file}").close()
    monkeypatch.setenv("PGPASSFILE", str(file))
    done = subprocess.run(
        [*VMCKPT, "--journal", login, "jobs", "--json"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_a_journal_is_named_by_libpqs_service(
    login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = parse_qs(urlsplit(login).query)
    file = tmp_path / "services"
    settings = {"host": query["host"][0], "user": "anna", "password": SECRET, "dbname": "postgres"}
    file.write_text("[vm]\n" + "".join(f"{key}={value}\n" for key, value in settings.items()))
    file.chmod(0o600)
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    options = urlsplit(login).query.partition("&options=")[2]
    for url in (
        f"postgresql:///?service=vm&options={options}",
        f"postgresql:///?options={options}",
    ):
        Journal(url).close()
        monkeypatch.setenv("PGSERVICE", "vm")  # for the second one


def wait(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_the_dashboard_starts_has_no_password_on_its_command_line(
    login: str, postgresql: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_JOURNAL", login.replace("anna@/", f"anna:{SECRET}@/"))
    begun = Processes({}).start(["events", "--follow"], 100)
    try:
        connected = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'anna'"
        wait(lambda: begun.said().code is not None or postgresql.sql(connected) != "0")
        assert begun.said().code is None, begun.said().text
        lines = command_lines(begun.pid)
        assert b"--follow" in lines[begun.pid]
        assert SECRET.encode() in environment(begun.pid)  # so it could have been there
        mode = Path(f"/proc/{begun.pid}/environ").stat().st_mode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(begun.pid, signal.SIGKILL)
        wait(lambda: begun.said().code is not None)
    assert all(SECRET.encode() not in line for line in lines.values())
    assert not mode & (stat.S_IRGRP | stat.S_IROTH)


async def test_a_fence_agent_has_its_password_from_standard_input_alone(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path / "agent")
    agent.behaves(status="hangs")
    stop = asyncio.Event()
    file = tmp_path / "password"
    file.write_text("correct-horse\n")
    device = agent.device({"ip": "10.9.0.11", "snmp": FENCE_SECRET}, password_file=file)
    running = asyncio.create_task(fence_agent.run(agent.host(), device, Action.STATUS, stop=stop))
    await asyncio.to_thread(wait, lambda: agent.calls)
    (pid,) = [one["pid"] for one in agent.calls]
    lines = command_lines(os.getsid(pid))
    surroundings = environment(pid)
    stop.set()
    with pytest.raises(Cancelled):
        await running
    assert agent.calls[0]["options"]["password"] == "correct-horse"
    assert str(agent.path).encode() in lines[pid]
    for secret in (b"correct-horse", FENCE_SECRET.encode()):
        assert all(secret not in line for line in lines.values())
        assert secret not in surroundings


def test_an_agent_gets_no_password_of_the_controllers() -> None:
    url = f"postgresql://vm:{SECRET}@witness:5433/db?passfile=/etc/x&sslpassword={SECRET}&sslmode=require"
    made = start._as_user(url, "vmckpt_lease_1", "own")
    assert made == "postgresql://vmckpt_lease_1:own@witness:5433/db?sslmode=require"
