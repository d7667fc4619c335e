"""The lease store: a PostgreSQL database that both hosts of a protected guest can reach and that
runs on neither of them.

The database records which host may run the guest. Each lease has a token, which increases with each
change of holder and each time that the standby becomes invalid; a request with an older token is
refused. `schema` describes the guarantees after a database crash, `terms` the times. Replicas of
the database must be synchronous (`synchronous_standby_names`). If a replica is promoted without the
last token, this is detected: no host can take over until the holder has confirmed the missing
change.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg
from psycopg import sql

from vmckpt.errors import LeaseLost, VmckptError
from vmckpt.lease import schema
from vmckpt.lease.clock import boottime
from vmckpt.lease.connection import LeaseConnection, LeaseRefused, LeaseUnreachable, settings
from vmckpt.lease.terms import LeaseTerms
from vmckpt.units import Seconds

LIMIT = Seconds(0.5)
_ADMIN_LIMIT = 10
_OLDEST = 130000  # the first version that has gen_random_uuid()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """The database login of one protection, with only the rights that its own lease requires."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credential(user={self.user!r})"


class LeaseForgotten(VmckptError):
    """The lease store's token is older than the holder's: the database failed over to a replica
    that lacks the last change. No other host holds the lease."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """This host now holds the lease with this token; the guest on the other host is dead."""

    token: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The lease cannot be taken over yet: try again after `rest`."""

    rest: Seconds


@dataclass(frozen=True, slots=True)
class Denied:
    """The lease cannot be taken over with this token in its present state."""

    why: str


TakeOver: TypeAlias = TakenOver | Wait | Denied


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The state of a lease, for display."""

    guest: str
    """The guest's UUID."""
    session: str
    state: str
    """free: no holder; held: a holder but no valid standby; protected: both."""
    token: int
    holder: str | None
    ttl: Seconds
    margin: Seconds
    age: Seconds
    """Time since the last renewal, by the database's clock; negative if the clock was set back."""
    rest: Seconds
    """Minimum time until a takeover is possible, as far as the database knows."""


# -- used by the controller ------------------------------------------------------------------------


def prepare(url: str) -> None:
    """Create or upgrade the tables and functions in the database.

    The call can be repeated, even by several controllers at once. The database user needs CREATE on
    the database, and CREATEROLE for `issue`. Raises BadInput if the URL is invalid,
    LeaseUnreachable, and LeaseRefused if the database cannot be used as a lease store.
    """
    with admin(url) as connection:
        _fit(connection)
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [schema.LOCK])
        connection.execute(schema.TABLES.encode())
        found = _value(connection, "SELECT max(version) FROM vmckpt_lease.layout")
        if found is not None and found > schema.LAYOUT:
            raise LeaseRefused(
                f"the lease store was prepared by a newer vmckpt (layout {found}; this version"
                f" uses layout {schema.LAYOUT})",
                hint="upgrade vmckpt on this machine",
            )
        if found is not None and found < schema.LAYOUT:
            connection.execute(schema.UPGRADE.encode())
        connection.execute(schema.FUNCTIONS.encode())
        if found != schema.LAYOUT:
            connection.execute("INSERT INTO vmckpt_lease.layout VALUES (%s)", [schema.LAYOUT])


def _fit(connection: psycopg.Connection[Any]) -> None:
    if connection.info.server_version < _OLDEST:
        raise LeaseRefused("the lease store needs PostgreSQL 13 or newer")
    for name in ("fsync", "full_page_writes"):
        if _value(connection, f"SHOW {name}") == "off":
            raise LeaseRefused(
                f"the lease store could lose leases if its machine crashes: {name} is off",
                hint=f"set {name} = on in postgresql.conf",
            )


def issue(url: str, guest: str, terms: LeaseTerms, session: str) -> Credential:
    """Create a lease on a guest (its UUID), without a holder, and the database login for it.

    The lease gets a new token: tokens of a guest are never reused. Raises LeaseRefused if the guest
    already has a lease; LeaseUnreachable; BadInput if the URL is invalid.
    """
    user = f"vmckpt_lease_{guest.replace('-', '')[:12]}_{secrets.token_hex(4)}"
    password = secrets.token_urlsafe(32)
    with admin(url) as connection:
        row = connection.execute(
            "INSERT INTO vmckpt_lease.lease AS l (guest, session, role, ttl, margin, state, token,"
            " renewed_at, beat)"
            " VALUES (%s, %s, %s, %s, %s, 'free', 1, clock_timestamp(), gen_random_uuid())"
            " ON CONFLICT (guest) DO UPDATE SET session = excluded.session, role = excluded.role,"
            " ttl = excluded.ttl, margin = excluded.margin, state = 'free', token = l.token + 1,"
            " holder = NULL, claim = NULL, renewed_at = excluded.renewed_at, beat = excluded.beat"
            " WHERE l.role IS NULL RETURNING token",
            [guest, session, user, terms.ttl, terms.margin],
        ).fetchone()
        if row is None:
            raise LeaseRefused(
                f"guest {guest} already has a lease",
                hint=f"run vmckpt unprotect {guest} first",
            )
        # Send only a digest of the password, since the server may log statements.
        digest = connection.pgconn.encrypt_password(
            password.encode(), user.encode(), b"scram-sha-256"
        )
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN NOINHERIT PASSWORD {}").format(
                sql.Identifier(user), sql.Literal(digest.decode())
            )
        )
        for kind, thing in _things(connection):
            grant = sql.SQL("GRANT {} ON {} TO {}")
            connection.execute(grant.format(kind, thing, sql.Identifier(user)))
    return Credential(user=user, password=password)


def _things(connection: psycopg.Connection[Any]) -> list[tuple[sql.SQL, sql.Composable]]:
    """Return everything that an agent's role may use, as (privilege, object)."""
    database = sql.Identifier(str(_value(connection, "SELECT current_database()")))
    calls = ", ".join(f"{schema.SCHEMA}.{call}" for call in schema.AGENT_CALLS)
    return [
        (sql.SQL("CONNECT"), sql.SQL("DATABASE {}").format(database)),
        (sql.SQL("USAGE"), sql.SQL("SCHEMA vmckpt_lease")),
        (sql.SQL("EXECUTE"), sql.Composed([sql.SQL("FUNCTION "), _as_sql(calls)])),
    ]


def _as_sql(text: str) -> sql.SQL:
    return sql.SQL(text)  # only constants are passed


def revoke(url: str, guest: str, *, force: bool = False, session: str | None = None) -> None:
    """End a guest's lease and drop its login; does nothing if there is no lease.

    `session`: revoke the lease only if it belongs to this session. A watchdog kills a guest whose
    lease can no longer be renewed, so the holder must release the lease first. Raises LeaseRefused
    if a host may still hold the lease, unless `force`; LeaseUnreachable.
    """
    with admin(url) as connection:
        row = connection.execute(
            "SELECT role, holder, renewed_at + make_interval(secs => ttl + margin)"
            " >= clock_timestamp() FROM vmckpt_lease.lease"
            " WHERE guest = %s AND coalesce(%s, session) = session FOR UPDATE",
            [guest, session],
        ).fetchone()
        if row is None or row[0] is None:
            return
        role, holder, lives = row
        if holder is not None and lives and not force:
            raise LeaseRefused(
                f"{holder} holds the lease on guest {guest}, and the lease has not expired",
                hint=f"run vmckpt unprotect {guest} first",
            )
        connection.execute(
            "UPDATE vmckpt_lease.lease SET role = NULL, state = 'ended', holder = NULL,"
            " claim = NULL, token = token + 1 WHERE guest = %s",
            [guest],
        )
        for kind, thing in _things(connection):
            take = sql.SQL("REVOKE {} ON {} FROM {}")
            connection.execute(take.format(kind, thing, sql.Identifier(role)))
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@contextmanager
def admin(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Run a transaction for the controller; it is on disk once the block has ended.

    Raises LeaseUnreachable or BadInput; LeaseRefused if the database user lacks a privilege.
    """
    told = settings(url)
    told["options"] = f"{told.get('options') or ''} -c synchronous_commit=on -c lock_timeout=10s"
    told |= {"connect_timeout": _ADMIN_LIMIT, "tcp_user_timeout": _ADMIN_LIMIT * 1000}
    try:
        with psycopg.connect(**told) as connection:
            yield connection
    except psycopg.Error as exc:
        text = " ".join(str(exc).split())
        secret = told.get("password")
        hidden = text.replace(str(secret), "***") if secret else text
        kind: type[VmckptError] = LeaseUnreachable
        if isinstance(exc, psycopg.errors.InsufficientPrivilege):
            kind = LeaseRefused
        raise kind(f"lease store: {hidden}") from exc


def _value(connection: psycopg.Connection[Any], statement: str) -> Any:
    row = connection.execute(statement.encode()).fetchone()
    return None if row is None else row[0]


# -- used by an agent ------------------------------------------------------------------------------


class LeaseClient:
    """A host's client for the lease store. Each call returns within `limit`.

    All calls raise LeaseUnreachable if the lease store does not answer. The outcome is then
    unknown, because the request may still arrive. Repeat a call that changes the token until it
    succeeds (the same object gets the token that it already created), or supersede it with
    `invalidate`. All calls raise LeaseRefused if the login lacks a privilege. All except `renew`,
    `take_over` and `look` raise LeaseLost if the lease is lost, for example to another host.
    """

    def __init__(
        self, dsn: str, *, holder: str, password: str | None = None, limit: Seconds = LIMIT,
        clock: Callable[[], Seconds] = boottime,
    ) -> None:  # fmt: skip
        """`holder`: the host's name. Raises BadInput if `dsn` is invalid."""
        self._line = LeaseConnection(dsn, password=password, limit=limit)
        self._holder, self._clock = holder, clock
        self._name = secrets.token_hex(8)
        self._beat, self._since = "", Seconds(0.0)
        """The last beat (see `schema`), and when the first answer with that beat arrived."""
        self._timeline = ""
        """PostgreSQL's timeline in the last answer."""
        self.protected = False
        """Whether the standby was valid at the last renewal, according to the lease store."""

    def close(self) -> None:
        self._line.close()

    def acquire(self) -> int:
        """Take the lease, for the first time or again after a restart; an existing standby becomes
        invalid.

        Call this only for a guest that is running or about to start on this host. Returns the
        token; call `renew` next. If the call is repeated on the same object and nothing has changed
        since, it returns the same token.
        """
        return self._token("acquire(%s, %s)", self._holder, f"{self._name} acquire")

    def acquire_again(self, token: int) -> int:
        """Take the lease again after LeaseForgotten for `token`. Returns a newer token."""
        claim = f"{self._name} acquire after {token}"
        return self._token("acquire_again(%s, %s, %s)", self._holder, claim, token)

    def renew(self, token: int) -> Seconds | None:
        """Renew the lease. Returns the time of the request, by CLOCK_BOOTTIME.

        The guest may run for `LeaseTerms.lasts` from that time. Returns None if the lease is lost
        for good: then the guest must be killed. After any error, the guest may run until its
        watchdog kills it. Raises LeaseForgotten (then call `acquire_again`), LeaseUnreachable.
        """
        sent = self._clock()
        told = self._ask("renew_on(%s, %s, %s)", token, self._holder, self._timeline)
        if told.get("forgot"):
            raise LeaseForgotten(
                f"the lease store does not know token {token}: it has lost its last change, for"
                " example in a failover to a replica",
                hint="make the lease store's replicas synchronous (synchronous_standby_names)",
            )
        self.protected = told.get("state") == "protected"
        return sent if told["said"] == "done" else None

    def validate(self, token: int) -> None:
        """Record that the standby has its first epoch and may take over with this token.

        Raises LeaseLost if this host does not hold the lease with `token`, LeaseUnreachable,
        LeaseRefused.
        """
        self._done("validate(%s, %s)", token, self._holder)

    def invalidate(self, token: int) -> int:
        """Record that the standby may never take over. Returns the new token, with which a new
        standby is validated."""
        claim = f"{self._name} invalidate {token}"
        return self._token("invalidate(%s, %s, %s)", token, self._holder, claim)

    def hand_over(self, token: int, to: str) -> int:
        """Give the lease to the host `to` at once. Returns the new token.

        Before this call, the guest on this host must be paused for good, or its QEMU must be gone.
        If there is no answer, the guest must not run until this call or `invalidate` succeeds.
        Raises LeaseRefused if the standby is not valid, LeaseUnreachable, LeaseLost.
        """
        claim = f"{self._name} hand over to {to} {token}"
        told = self._ask("hand_over(%s, %s, %s, %s)", token, self._holder, to, claim)
        if told["said"] == "denied":
            raise LeaseRefused(f"the lease cannot be handed over: {told['why']}")
        return _token_of(told)

    def release(self, token: int) -> None:
        """Give up the lease after the protection has ended and its watchdog has been removed.

        Raises LeaseLost if this host does not hold the lease with `token`, LeaseUnreachable,
        LeaseRefused.
        """
        self._done("release(%s, %s)", token, self._holder)

    def take_over(self, token: int) -> TakeOver:
        """Take the lease for the standby once the guest on the holder's host is certainly dead.

        `token`: the standby's token. Two conditions must be met. By the database's clock, the last
        renewal and the start of the database must be at least ttl + margin ago. By its own clock,
        this object must have seen no new renewal for ttl + margin. Call `look` regularly; otherwise
        the takeover begins with a full wait.
        """
        watched = max(0.0, self._clock() - self._since) if self._beat else 0.0
        told = self._ask(
            "take_over(%s, %s, %s, %s, %s::float8)",
            token, self._holder, f"{self._name} take over {token}", self._beat, watched,
        )  # fmt: skip
        match told["said"]:
            case "done":
                return TakenOver(int(told["token"]))
            case "wait":
                self._seen(told["beat"])
                return Wait(Seconds(float(told["rest"])))
            case _:
                return Denied(str(told["why"]))

    def look(self) -> LeaseView:
        """Return the state of the lease. On the standby's host, also observe the holder's renewals.

        Raises LeaseUnreachable, and LeaseRefused if the login has no lease.
        """
        told = self._ask("look()")
        if told["said"] != "done":
            raise LeaseRefused(f"the lease store refused the request: {told['why']}")
        self._seen(told["beat"])
        names = ("guest", "session", "state", "token", "holder", "ttl", "margin", "age", "rest")
        return LeaseView(**{name: told[name] for name in names})

    def _seen(self, beat: str) -> None:
        """Record a new heartbeat and the time now, which is later than when it was written."""
        if beat != self._beat:
            self._beat, self._since = beat, self._clock()

    def _ask(self, call: str, *arguments: object) -> dict[str, Any]:
        told = self._line.ask(f"SELECT vmckpt_lease.{call}", arguments)
        if not isinstance(told, dict):
            raise LeaseUnreachable("the lease store returned an invalid answer")
        self._timeline = str(told.get("timeline", self._timeline))
        return told

    def _done(self, call: str, *arguments: object) -> dict[str, Any]:
        told = self._ask(call, *arguments)
        if told["said"] != "done":
            raise LeaseLost(f"the lease is lost: {told['why']}")
        return told

    def _token(self, call: str, *arguments: object) -> int:
        return _token_of(self._done(call, *arguments))


def _token_of(told: dict[str, Any]) -> int:
    if told["said"] != "done":
        raise LeaseLost(f"the lease is lost: {told['why']}")
    return int(told["token"])
