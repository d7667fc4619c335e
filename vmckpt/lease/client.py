"""The lease store: a PostgreSQL database that both hosts of a protected guest reach, on neither of
them.

It records which host may run the guest. Each lease has a token, which grows with each change of the
holder and each time that the standby becomes invalid; a request with an older token is refused.
`schema` describes what holds after a crash of the database, `terms` has the times. The replicas of
a database must be synchronous (`synchronous_standby_names`). A replica that is promoted without the
last token is noticed, and no host can take over until the holder has confirmed the missing change.
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
    """The database login of one protection, with no rights but those that its own lease needs."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credential(user={self.user!r})"


class LeaseForgotten(VmckptError):
    """The lease store has an older token than the lease's holder: it failed over to a replica that
    lacks the last change. No other host holds the lease."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """This host holds the lease now, with this token; the guest on the other host is dead."""

    token: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The lease cannot be taken over yet: ask again after `rest`."""

    rest: Seconds


@dataclass(frozen=True, slots=True)
class Denied:
    """The lease can never be taken over with this token."""

    why: str


TakeOver: TypeAlias = TakenOver | Wait | Denied


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The state of a lease, for display."""

    guest: str
    """The guest's UUID."""
    session: str
    state: str
    """free: without a holder; held: with a holder and no valid standby; protected: with both."""
    token: int
    holder: str | None
    ttl: Seconds
    margin: Seconds
    age: Seconds
    """Time since the last renewal, by the database's clock; negative if the clock was set back."""
    rest: Seconds
    """How long a takeover must wait at least, as far as the database knows."""


# -- what the controller does ----------------------------------------------------------------------


def prepare(url: str) -> None:
    """Create or upgrade the tables and functions in the database.

    May be repeated, and run by several controllers at once. Its user needs CREATE on the database,
    and CREATEROLE for `issue`. Raises LeaseUnreachable, and LeaseRefused if the database cannot be
    a lease store.
    """
    with admin(url) as connection:
        _fit(connection)
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [schema.LOCK])
        connection.execute(schema.TABLES.encode())
        found = _value(connection, "SELECT max(version) FROM vmckpt_lease.layout")
        if found is not None and found > schema.LAYOUT:
            raise LeaseRefused(
                f"the lease store was prepared by a newer vmckpt (layout {found}; this one has"
                f" layout {schema.LAYOUT})",
                hint="upgrade vmckpt here",
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
                f"the lease store could lose leases in a crash of its machine: {name} is off",
                hint=f"set {name} = on in postgresql.conf",
            )


def issue(url: str, guest: str, terms: LeaseTerms, session: str) -> Credential:
    """Create a lease on a guest (its UUID), without a holder, and the database login for it.

    Its token is new: no token of a guest is used twice. Raises LeaseRefused if the guest has a
    lease; LeaseUnreachable.
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
                f"guest {guest} already has a lease", hint="end its protection first"
            )
        # The digest of the password: statements may be in the server's log.
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
    """Return all that an agent's role may use, as (privilege, object)."""
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
    """End a guest's lease and drop its login; does nothing if there is none.

    `session`: only if the lease belongs to this session. A watchdog kills a guest whose lease
    cannot be renewed any more, so the holder must release the lease first. Raises LeaseRefused if a
    host may still hold the lease, unless `force`; LeaseUnreachable.
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
                f"{holder} holds the lease on guest {guest} and renewed it just now",
                hint="end the protection on that host first",
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
    """Run a transaction of the controller, which is on disk when it ends.

    Raises LeaseUnreachable; LeaseRefused if the user may not do this.
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


# -- what an agent does ----------------------------------------------------------------------------


class LeaseClient:
    """The lease store as one host uses it. Each call answers within `limit`.

    All calls raise LeaseUnreachable if there is no answer. Then the outcome stays unknown, because
    the request may still arrive. Repeat a call that changes the token until it answers (the same
    object gets the token that it already created), or let `invalidate` supersede it. All raise
    LeaseRefused if the login may not do this, and LeaseLost if another host holds the lease or its
    token has changed.
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
        """The last beat, and when the first answer with it arrived."""
        self._timeline = ""
        """PostgreSQL's timeline in the last answer."""
        self.protected = False
        """Whether the standby was valid at the last renewal, by the lease store."""

    def close(self) -> None:
        self._line.close()

    def acquire(self) -> int:
        """Take the lease, for the first time or again after a restart; an existing standby becomes
        invalid.

        Only for a guest that runs on this host or is about to start on it. Returns the token; call
        `renew` next. If the same object calls again and nothing has changed since, it gets the same
        token.
        """
        return self._token("acquire(%s, %s)", self._holder, f"{self._name} acquire")

    def acquire_again(self, token: int) -> int:
        """Take the lease again after LeaseForgotten for `token`. Returns a newer token."""
        claim = f"{self._name} acquire after {token}"
        return self._token("acquire_again(%s, %s, %s)", self._holder, claim, token)

    def renew(self, token: int) -> Seconds | None:
        """Renew the lease. Returns when the request was sent, by CLOCK_BOOTTIME.

        The guest may run for `LeaseTerms.lasts` from then. Returns None if the lease is lost for
        good: then the guest must be killed. After any error the guest may run until its watchdog
        ends it. Raises LeaseForgotten: call `acquire_again`.
        """
        sent = self._clock()
        told = self._ask("renew_on(%s, %s, %s)", token, self._holder, self._timeline)
        if told.get("forgot"):
            raise LeaseForgotten(
                f"the lease store does not know token {token}: it failed over to a replica that"
                " lacks the last change",
                hint="make its replicas synchronous (synchronous_standby_names)",
            )
        self.protected = told.get("state") == "protected"
        return sent if told["said"] == "done" else None

    def validate(self, token: int) -> None:
        """Record that the standby has its first epoch and may take over with this token.

        Raises LeaseLost if this host does not hold the lease with `token`.
        """
        self._done("validate(%s, %s)", token, self._holder)

    def invalidate(self, token: int) -> int:
        """Record that the standby may never take over. Returns the new token; a new standby is
        validated with it."""
        claim = f"{self._name} invalidate {token}"
        return self._token("invalidate(%s, %s, %s)", token, self._holder, claim)

    def hand_over(self, token: int, to: str) -> int:
        """Give the lease to the host `to` at once, for a planned switchover. Returns the new token.

        The guest must be paused here for good before this is called. If there is no answer, it
        stays paused until this call or `invalidate` answers. Raises LeaseRefused if the standby is
        not valid.
        """
        claim = f"{self._name} hand over to {to} {token}"
        told = self._ask("hand_over(%s, %s, %s, %s)", token, self._holder, to, claim)
        if told["said"] == "denied":
            raise LeaseRefused(f"the lease cannot be handed over: {told['why']}")
        return _token_of(told)

    def release(self, token: int) -> None:
        """Give up the lease after the protection has ended and its watchdog was removed.

        Raises LeaseLost if this host does not hold it with `token`.
        """
        self._done("release(%s, %s)", token, self._holder)

    def take_over(self, token: int) -> TakeOver:
        """Take the lease for the standby, which has this token, if the guest must be dead on the
        holder's host.

        Two conditions must hold: by the database's clock, the last renewal and the start of the
        database are ttl + margin ago; and this object has seen no new renewal for ttl + margin by
        its own clock. Call `look` regularly, or the takeover begins with a full wait.
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
        """Return the state of the lease. On the standby's host this also observes the holder's
        renewals.

        Raises LeaseRefused if the login has no lease.
        """
        told = self._ask("look()")
        if told["said"] != "done":
            raise LeaseRefused(f"the lease store refused this: {told['why']}")
        self._seen(told["beat"])
        names = ("guest", "session", "state", "token", "holder", "ttl", "margin", "age", "rest")
        return LeaseView(**{name: told[name] for name in names})

    def _seen(self, beat: str) -> None:
        """Note a beat. It counts from its arrival, as it was written before that."""
        if beat != self._beat:
            self._beat, self._since = beat, self._clock()

    def _ask(self, call: str, *arguments: object) -> dict[str, Any]:
        told = self._line.ask(f"SELECT vmckpt_lease.{call}", arguments)
        if not isinstance(told, dict):
            raise LeaseUnreachable("the lease store gave an unknown answer")
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
