"""The witness on a real PostgreSQL: who may run a guest, by whose clock, and with which login."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest

from tests.support import postgres
from tests.support.lease_protection import TERMS, Protection, protected, waited
from vmckpt.errors import BadInput, LeaseLost
from vmckpt.lease import client as lease_client
from vmckpt.lease.client import Denied, LeaseClient, TakenOver
from vmckpt.lease.clock import boottime
from vmckpt.lease.connection import LeaseRefused, LeaseUnreachable
from vmckpt.units import Seconds
from vmckpt_lab.machine_speed import slowness


@pytest.fixture
def protection(postgresql: postgres.Server) -> Iterator[Protection]:
    made = Protection(postgresql)
    yield made
    for client in made.clients:
        client.close()
    lease_client.revoke(postgresql.url(), made.guest, force=True)


def test_a_silent_holder_is_followed_after_ttl_and_margin_and_not_before(
    protection: Protection,
) -> None:
    alpha, beta, token = protected(protection)
    assert protection.server.sql("SELECT pg_sleep(1.3)") == ""  # since the server's own start
    beta.look()
    sent = alpha.renew(token)
    assert sent is not None
    got: object = None
    while not isinstance(got := beta.take_over(token), TakenOver):
        assert waited(got) <= TERMS.waits
        time.sleep(min(0.05, waited(got)))
    passed = boottime() - sent

    assert TERMS.waits <= passed < TERMS.waits + 0.5 * slowness()
    assert got == TakenOver(token + 1)
    assert alpha.renew(token) is None
    with pytest.raises(LeaseLost, match="beta holds the lease"):
        alpha.acquire()


def test_two_who_take_over_at_once_are_one(protection: Protection) -> None:
    for _ in range(4):
        protection.set("holder = NULL, state = 'free'")
        _, beta, token = protected(protection)
        gamma = protection.client("gamma")
        for client in (beta, gamma):
            client.look()
        protection.database_clock_forward()
        protection.ahead += 10
        line = threading.Barrier(2)

        def take(client: LeaseClient, line: threading.Barrier, token: int) -> object:
            line.wait()
            return client.take_over(token)

        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(take, client, line, token) for client in (beta, gamma)]
        kinds = sorted(type(one.result()).__name__ for one in both)

        assert kinds == ["Denied", "TakenOver"]


def test_a_standby_that_is_not_valid_or_has_an_old_token_is_denied(protection: Protection) -> None:
    alpha, beta, token = protected(protection)
    beta.look()
    protection.database_clock_forward()
    protection.ahead += 10

    newer = alpha.invalidate(token)
    assert newer == token + 1
    assert beta.take_over(newer) == Denied("the standby is not valid")
    assert beta.take_over(token) == Denied(f"the standby has token {token}, the lease has {newer}")
    assert alpha.take_over(newer) == Denied("the standby is not valid")
    alpha.validate(newer)
    assert alpha.take_over(newer) == Denied("alpha already holds the lease")
    assert alpha.renew(token) is None
    for call in (alpha.validate, alpha.release, protection.client("alpha").invalidate):
        with pytest.raises(LeaseLost, match=f"token {token} is not current; the current token is"):
            call(token)


def test_a_database_whose_clock_is_set_forward_lets_nobody_in_early(
    protection: Protection,
) -> None:
    protection.stopped = boottime()
    alpha, beta, token = protected(protection)
    beta.look()
    protection.database_clock_forward()

    assert waited(beta.take_over(token)) == pytest.approx(TERMS.waits)
    protection.ahead += TERMS.waits - 0.1
    assert waited(beta.take_over(token)) == pytest.approx(0.1)
    # A renewal that was seen begins it anew, however old it looks.
    assert alpha.renew(token)
    protection.database_clock_forward()
    protection.ahead += 10
    assert waited(beta.take_over(token)) == pytest.approx(TERMS.waits)
    protection.ahead += TERMS.waits + 0.001
    assert beta.take_over(token) == TakenOver(token + 1)


def test_a_database_whose_clock_is_set_back_keeps_nobody_out_for_long(
    protection: Protection,
) -> None:
    _, beta, token = protected(protection)
    protection.database_clock_forward()
    protection.set("renewed_at = clock_timestamp() + interval '1 hour'")

    assert waited(beta.take_over(token)) == pytest.approx(TERMS.waits)
    protection.ahead += TERMS.waits
    assert beta.take_over(token) == TakenOver(token + 1)


def test_a_host_whose_own_clock_is_ahead_is_let_in_by_the_database_s(
    protection: Protection,
) -> None:
    alpha, beta, token = protected(protection)
    assert alpha.renew(token)
    beta.look()
    protection.ahead += 10
    assert 0 < waited(beta.take_over(token)) <= TERMS.waits


def test_a_host_that_has_not_watched_waits_as_long_as_one_that_just_saw_a_renewal(
    protection: Protection,
) -> None:
    _, beta, token = protected(protection)
    protection.database_clock_forward()
    protection.ahead += 1000

    assert waited(beta.take_over(token)) == pytest.approx(TERMS.waits)


def test_a_planned_switch_is_at_once_and_the_other_holds_it_then(protection: Protection) -> None:
    alpha, beta, token = protected(protection)

    assert alpha.hand_over(token, "beta") == token + 1
    assert alpha.hand_over(token, "beta") == token + 1  # its answer was lost
    assert alpha.renew(token) is None
    assert beta.renew(token + 1)
    assert beta.acquire() == token + 2
    state = beta.look()
    assert (state.holder, state.state, state.token) == ("beta", "held", token + 2)
    with pytest.raises(LeaseRefused, match="the standby is not valid"):
        beta.hand_over(token + 2, "alpha")


def test_an_agent_of_an_older_version_does_not_renew_a_lease_that_it_lost(
    protection: Protection,
) -> None:
    alpha, _, token = protected(protection)
    with psycopg.connect(protection.dsn(), autocommit=True) as connection:

        def renewed(by: int) -> object:
            asked = "SELECT vmckpt_lease.renew(%s, 'alpha')"
            (told,) = connection.execute(asked, (by,)).fetchone() or (None,)
            return told

        assert renewed(token) == {"said": "done"}
        alpha.hand_over(token, "beta")
        assert renewed(token) == {"said": "lost"}
        assert renewed(token + 1) == {"said": "lost"}


def test_a_call_that_is_repeated_because_its_answer_was_lost_has_its_first_outcome(
    protection: Protection,
) -> None:
    alpha, beta, token = protected(protection)
    newer = alpha.invalidate(token)
    assert alpha.invalidate(token) == newer
    assert alpha.acquire() == alpha.acquire() == newer + 1
    token = newer + 1
    alpha.validate(token)
    alpha.validate(token)
    beta.look()
    protection.database_clock_forward()
    protection.ahead += 10
    assert beta.take_over(token) == TakenOver(token + 1)
    assert beta.take_over(token) == TakenOver(token + 1)
    # Somebody else on that host does not get it so.
    assert protection.client("beta").take_over(token) == Denied(
        f"the standby has token {token}, the lease has {token + 1}"
    )
    beta.release(token + 1)
    beta.release(token + 1)
    assert beta.look().state == "free"


def test_a_hand_over_that_arrives_late_is_overtaken_by_invalidate(protection: Protection) -> None:
    alpha, beta, token = protected(protection)
    newer = alpha.invalidate(token)

    with pytest.raises(LeaseLost, match="is not current; the current token is"):
        alpha.hand_over(token, "beta")
    assert alpha.renew(newer)
    assert beta.renew(newer) is None


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        ("acquire('alpha', 'again')", "on"),
        ("validate({token}, 'alpha')", "on"),
        ("invalidate({token}, 'alpha', 'c')", "on"),
        ("take_over({token}, 'beta', 'c', '', 0)", "on"),
        ("hand_over({token}, 'alpha', 'beta', 'c')", "on"),
        ("release({token}, 'alpha')", "on"),
        ("renew({token}, 'alpha')", "off"),
        ("look()", "off"),
    ],
)
def test_whatever_may_change_the_token_waits_for_the_disk_also_where_the_server_does_not(
    protection: Protection, call: str, waits: str
) -> None:
    """As its commit does: the setting that is in force at the end of the transaction."""
    _, _, token = protected(protection)
    with psycopg.connect(
        protection.dsn(), password=protection.credential.password,
        options="-c synchronous_commit=off",
    ) as connection:  # fmt: skip
        connection.execute(f"SELECT vmckpt_lease.{call.format(token=token)}".encode())
        assert connection.execute("SHOW synchronous_commit").fetchone() == (waits,)
        connection.rollback()


def test_a_restarted_holder_makes_its_standby_worthless(protection: Protection) -> None:
    _, beta, token = protected(protection)
    again = protection.client("alpha")

    assert again.acquire() == token + 1
    assert beta.take_over(token) == Denied(
        f"the standby has token {token}, the lease has {token + 1}"
    )
    assert again.look().state == "held"


def test_tokens_of_a_guest_grow_over_all_its_protections(protection: Protection) -> None:
    url = protection.server.url()
    alpha, _, token = protected(protection)
    why = f"has a lease; run vmckpt unprotect {protection.guest} first"
    with pytest.raises(LeaseRefused, match=why):
        lease_client.issue(url, protection.guest, TERMS, "s-2")
    with pytest.raises(LeaseRefused, match="and the lease has not expired"):
        lease_client.revoke(url, protection.guest)
    alpha.release(token)
    lease_client.revoke(url, protection.guest)
    lease_client.revoke(url, protection.guest)
    with pytest.raises(LeaseRefused, match="permission denied"):
        alpha.renew(token)  # its connection is still there
    protection.credential = lease_client.issue(url, protection.guest, TERMS, "s-2")

    assert protection.client("alpha").acquire() > token + 1


def test_an_agents_login_can_do_nothing_but_its_own_calls(protection: Protection) -> None:
    protected(protection)
    other = Protection(protection.server)
    other.client("alpha").acquire()
    with suppress(RuntimeError):
        protection.server.sql("CREATE DATABASE elsewhere")
    forbidden = [
        "SELECT * FROM vmckpt_lease.lease",
        "UPDATE vmckpt_lease.lease SET token = 1",
        "SELECT * FROM vmckpt_lease.memory",
        "INSERT INTO vmckpt_lease.memory DEFAULT VALUES",
        "TRUNCATE vmckpt_lease.memory",
        "SELECT vmckpt_lease.mine()",
        "SELECT vmckpt_lease.change(NULL, 'me', 'held', '')",
        "CREATE TABLE mine (n int)",
        "CREATE SCHEMA mine",
        "CREATE FUNCTION vmckpt_lease.f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE ROLE mine",
        f"SET ROLE {other.credential.user}",
        f"SET SESSION AUTHORIZATION {other.credential.user}",
        "SELECT rolpassword FROM pg_authid",
        "SELECT pg_read_file('/etc/passwd')",
        "COPY (SELECT 1) TO PROGRAM 'true'",
    ]
    with psycopg.connect(protection.dsn(), autocommit=True) as connection:
        for statement in forbidden:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
        # A table of its own in front of the real one changes nothing.
        connection.execute("CREATE TEMPORARY TABLE lease (role name, token bigint, holder text)")
        connection.execute("INSERT INTO lease VALUES (session_user, 77, 'me')")
        connection.execute("SET search_path = pg_temp, public")
        (told,) = connection.execute("SELECT vmckpt_lease.renew(77, 'me')").fetchone() or ("",)
        assert told == {"said": "lost"}
    with (
        psycopg.connect(protection.dsn("elsewhere"), autocommit=True) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("CREATE TABLE mine (n int)")
    assert other.get("token") == "2"
    other.clients[0].close()
    lease_client.revoke(other.server.url(), other.guest, force=True)


def test_many_may_prepare_it_at_once(postgresql: postgres.Server) -> None:
    name = f"fresh{uuid.uuid4().hex[:8]}"
    postgresql.sql(f"CREATE DATABASE {name}")
    url = postgresql.url().replace("/postgres?", f"/{name}?")
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(lease_client.prepare, url) for _ in range(4)]:
            done.result()
    credential = lease_client.issue(url, str(uuid.uuid4()), TERMS, "s")
    with psycopg.connect(url, autocommit=True) as connection:
        count = connection.execute("SELECT count(*) FROM vmckpt_lease.layout").fetchone()
        connection.execute("UPDATE vmckpt_lease.layout SET version = 99")

    assert count == (1,)
    assert credential.password not in repr(credential)
    with pytest.raises(LeaseRefused, match="prepared by a newer vmckpt"):
        lease_client.prepare(url)


def test_who_prepares_it_needs_no_superuser(postgresql: postgres.Server) -> None:
    name = f"modest{uuid.uuid4().hex[:8]}"
    guest = str(uuid.uuid4())
    postgresql.sql(f"CREATE ROLE {name} LOGIN CREATEROLE")
    postgresql.sql(f"CREATE DATABASE {name} OWNER {name}")
    url = postgresql.url().replace("postgres@/postgres?", f"{name}@/{name}?")
    lease_client.prepare(url)
    lease_client.prepare(url)
    login = lease_client.issue(url, guest, TERMS, "s").user
    client = LeaseClient(url.replace(f"{name}@", f"{login}@"), holder="alpha", limit=Seconds(2.0))

    assert client.renew(client.acquire())
    client.close()
    lease_client.revoke(url, guest, force=True)
    with pytest.raises(LeaseUnreachable, match="does not exist"):
        LeaseClient(url.replace(f"{name}@", f"{login}@"), holder="alpha").look()


def test_an_address_that_cannot_be_read_is_refused_without_its_password() -> None:
    with pytest.raises(BadInput) as caught:
        LeaseClient("postgresql://u:geheim7@h/d?nonsense=1", holder="alpha")

    assert "geheim7" not in str(caught.value)
