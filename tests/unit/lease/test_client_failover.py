"""The witness fails over to a replica, which may lack what was confirmed last."""

import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from tests.support import postgres
from tests.support.lease_protection import TERMS, Protection, protected, waited
from vmckpt.lease.client import Denied, LeaseClient, LeaseForgotten, TakenOver, TakeOver
from vmckpt.lease.connection import LeaseUnreachable


class Pair:
    """A server and its replica at one address, which is the server's until `fail_over`."""

    def __init__(self, folder: Path) -> None:
        self._address = folder / "at"
        self._server = postgres.Server()
        self._replica = postgres.Server(follows=self._server, name="replica")
        self._address.symlink_to(self._server._folder)

    def url(self) -> str:
        return self._server.url().replace(str(self._server._folder), str(self._address))

    def sql(self, statement: str) -> str:
        return self._server.sql(statement)

    def follow(self) -> None:
        """The replica knows all that the server knows now, and hears of nothing more."""
        now = self._server.sql("SELECT pg_current_wal_insert_lsn()")
        while self._replica.sql(f"SELECT pg_last_wal_replay_lsn() >= '{now}'::pg_lsn") != "t":
            time.sleep(0.02)
        self._replica.stop()

    def fail_over(self) -> None:
        self._server.stop(signal.SIGQUIT)
        self._replica.start()
        self._replica.sql("SELECT pg_promote()")
        self._address.unlink()
        self._address.symlink_to(self._replica._folder)
        self._server, self._replica = self._replica, self._server

    def remove(self) -> None:
        self._server.remove()
        self._replica.remove()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="vmckpt-") as folder:
        Path(folder).chmod(0o755)
        made = Pair(Path(folder))
        yield made
        made.remove()


@pytest.fixture
def protection(pair: Pair) -> Protection:
    return Protection(cast("postgres.Server", pair), limit=5.0)


def asked(protection: Protection, beta: LeaseClient, token: int) -> TakeOver:
    """What the standby's host is told in the end: it has watched for as long as need be."""
    told = beta.take_over(token)
    if not isinstance(told, Denied):
        waited(told)
        protection.database_clock_forward()
        protection.ahead += TERMS.waits + 1
        told = beta.take_over(token)
    return told


def test_a_standby_that_was_declared_invalid_takes_over_nothing_though_that_was_forgotten(
    pair: Pair, protection: Protection
) -> None:
    alpha, beta, old = protected(protection)
    pair.follow()
    token = alpha.invalidate(old)  # alpha lets its output out
    pair.fail_over()

    told = asked(protection, beta, old)
    assert isinstance(told, Denied)
    assert "alpha has not confirmed the standby since" in told.why
    with pytest.raises(LeaseForgotten, match=f"does not know token {token}"):
        alpha.renew(token)
    assert isinstance(asked(protection, beta, old), Denied)
    again = alpha.acquire_again(token)
    assert again == alpha.acquire_again(token)
    assert again > token
    assert alpha.renew(again)
    assert isinstance(asked(protection, beta, old), Denied)
    assert isinstance(asked(protection, beta, again), Denied)  # it is not valid yet
    alpha.validate(again)
    assert isinstance(asked(protection, beta, again), TakenOver)


def test_after_a_failover_that_loses_nothing_its_holder_confirms_the_standby(
    pair: Pair, protection: Protection
) -> None:
    alpha, beta, token = protected(protection)
    pair.follow()
    pair.fail_over()

    assert isinstance(beta.take_over(token), Denied)
    assert alpha.renew(token)
    assert isinstance(beta.take_over(token), Denied)  # that one may have been sent before
    assert alpha.renew(token)
    assert alpha.protected
    assert isinstance(asked(protection, beta, token), TakenOver)


def test_with_synchronous_replicas_nobody_needs_to_confirm_anything(
    pair: Pair, protection: Protection
) -> None:
    alpha, beta, token = protected(protection)
    pair.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
    pair.sql("SELECT pg_reload_conf()")
    while protection.get("synchronous") != "t":
        assert alpha.renew(token)
    pair.follow()
    pair.fail_over()

    assert isinstance(asked(protection, beta, token), TakenOver)


def test_a_change_that_does_not_wait_for_its_replica_any_more_is_no_answer(
    pair: Pair, protection: Protection
) -> None:
    """PostgreSQL commits it all the same, and only warns."""
    alpha, _, token = protected(protection)
    pair.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
    pair.sql("SELECT pg_reload_conf()")
    while protection.get("synchronous") != "t":
        assert alpha.renew(token)
    pair.follow()
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(alpha.invalidate, token)
        waits = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        while pair.sql(f"SELECT count(pg_cancel_backend(pid)) {waits}") == "0":
            time.sleep(0.02)
        with pytest.raises(LeaseUnreachable, match="canceling wait for synchronous replication"):
            told.result()
    assert protection.get("token") == str(token + 1)


def test_a_holder_is_told_that_its_standby_is_not_valid_any_more(
    pair: Pair, protection: Protection
) -> None:
    alpha = protection.client("alpha")
    token = alpha.acquire()
    pair.follow()
    alpha.validate(token)
    assert alpha.renew(token)
    assert alpha.protected
    pair.fail_over()

    assert alpha.renew(token)
    assert not alpha.protected


def test_a_token_that_was_never_renewed_is_not_confirmed_either(
    pair: Pair, protection: Protection
) -> None:
    alpha, beta = protection.client("alpha"), protection.client("beta")
    token = alpha.acquire()
    alpha.validate(token)
    pair.follow()
    alpha.invalidate(token)
    pair.fail_over()

    assert isinstance(asked(protection, beta, token), Denied)


def test_a_store_of_the_layout_before_is_brought_up(pair: Pair) -> None:
    before = Protection(cast("postgres.Server", pair), limit=5.0)
    pair.sql("ALTER TABLE vmckpt_lease.lease DROP COLUMN timeline, DROP COLUMN synchronous")
    pair.sql("UPDATE vmckpt_lease.layout SET version = 1")
    Protection(cast("postgres.Server", pair), limit=5.0)

    assert pair.sql("SELECT max(version) FROM vmckpt_lease.layout") == "2"
    alpha, beta, token = protected(before)
    assert alpha.renew(token)
    assert isinstance(asked(before, beta, token), TakenOver)
