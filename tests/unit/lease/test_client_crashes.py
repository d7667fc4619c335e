"""The witness on a PostgreSQL that hangs, crashes and forgets."""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from tests.support import postgres
from tests.support.lease_protection import TERMS, Protection, protected, waited
from vmckpt.lease.client import Credential
from vmckpt.lease.connection import LeaseUnreachable


@pytest.fixture(scope="module")
def fragile() -> Iterator[postgres.Server]:
    """A server of one's own, to be mistreated."""
    server = postgres.Server()
    yield server
    server.remove()


def _family(server: postgres.Server) -> list[int]:
    """The server and its children."""
    assert server._server is not None
    parent = server._server.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *map(int, children)]


def test_every_call_ends_within_its_limit_while_the_server_hangs(fragile: postgres.Server) -> None:
    protection = Protection(fragile, limit=0.3)
    alpha, _, token = protected(protection)
    fresh = protection.client("alpha")
    family = _family(fragile)
    for process in family:
        os.kill(process, signal.SIGSTOP)
    try:
        for client in itertools.islice(itertools.cycle([alpha, fresh]), 10):
            began = time.monotonic()
            with pytest.raises(LeaseUnreachable, match="did not answer within 300 ms"):
                client.renew(token)
            assert time.monotonic() - began < 1.0  # nothing of libpq ends as soon
    finally:
        for process in family:
            os.kill(process, signal.SIGCONT)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with suppress(LeaseUnreachable):
            assert alpha.renew(token)
            return
        time.sleep(0.05)
    pytest.fail("the client did not come back")


def test_a_crash_that_takes_renewals_with_it_lets_nobody_in_early(
    fragile: postgres.Server,
) -> None:
    """Of the whole server, and of one process in it, where the server itself goes on."""
    protection = Protection(fragile, limit=2.0)
    alpha, beta, token = protected(protection)

    def crash_all() -> None:
        fragile.stop(signal.SIGQUIT)
        fragile.start()

    def crash_one() -> None:
        with psycopg.connect(fragile.url(), autocommit=True) as connection:
            os.kill(connection.info.backend_pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with suppress(RuntimeError):
                fragile.sql("SELECT 1")
                return
            time.sleep(0.05)

    for crash in (crash_all, crash_one):
        beta.look()
        before = protection.get("beat")
        assert alpha.renew(token)
        crash()
        # As if the renewal had not come to disk; beta saw the one before, and watched it for long.
        protection.set(f"beat = '{before}', renewed_at = clock_timestamp() - interval '1 hour'")
        protection.ahead += 1000
        assert waited(beta.take_over(token)) == pytest.approx(TERMS.waits, abs=0.01)
        protection.ahead += 1000
        assert waited(beta.take_over(token)) > 0.1
        assert fragile.sql("SELECT count(*) FROM vmckpt_lease.memory") == "1"
        assert alpha.renew(token)
    started = "clock_timestamp() - pg_postmaster_start_time() > interval '0.2 s'"
    assert fragile.sql(f"SELECT {started}") == "t"


def test_a_token_that_changed_is_on_disk_before_it_is_told(fragile: postgres.Server) -> None:
    fragile.sql("ALTER SYSTEM SET synchronous_commit = off")
    fragile.sql("ALTER SYSTEM SET wal_writer_delay = '10s'")
    fragile.stop()
    fragile.start()
    protection = Protection(fragile, limit=2.0)
    alpha, _, token = protected(protection)
    token = alpha.invalidate(token)
    fragile.stop(signal.SIGQUIT)
    fragile.start()

    assert alpha.look().token == token


def test_a_password_is_asked_for_and_stands_in_no_log(fragile: postgres.Server) -> None:
    folder = fragile._folder
    rules = "local all postgres trust\nlocal all all scram-sha-256\n"
    (folder / "data/pg_hba.conf").write_text(rules)
    fragile.sql("ALTER SYSTEM SET log_statement = 'all'")
    fragile.sql("SELECT pg_reload_conf()")
    time.sleep(0.3)
    protection = Protection(fragile, limit=2.0)
    right = protection.credential

    assert protection.client("alpha").acquire()
    protection.credential = Credential(user=right.user, password="geheim7")
    with pytest.raises(LeaseUnreachable, match="password authentication failed") as caught:
        protection.client("beta").look()
    assert "geheim7" not in str(caught.value)
    log = (folder / "log").read_text()
    assert f'CREATE ROLE "{right.user}" LOGIN' in log
    assert right.password not in log
