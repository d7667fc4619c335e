"""The witness: a PostgreSQL database that both hosts of a protected guest reach, and is on neither.

It keeps who may run the guest. The token grows with each change of hands and whenever the standby
becomes worthless, and who shows an older one is refused. See `schema` for what holds after
a crash of the database, `terms` for the times. A database with replicas needs them synchronous
(`synchronous_standby_names`): one that is promoted without the last token is noticed, and lets
nothing take over until the holder has confirmed what it lacks.
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
_OLDEST = 130000  # gen_random_uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A login of one protection: it can do nothing but what its own lease needs."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credential(user={self.user!r})"


class LeaseForgotten(VmckptError):
    """The witness knows an older token than its holder: it was failed over to a replica that lacks
    the last change. No other host holds the lease."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The lease is ours, with this token; the other's guest is dead by now."""

    token: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet: ask again after so long."""

    rest: Seconds


@dataclass(frozen=True, slots=True)
class Denied:
    """Never with this token."""

    why: str


TakeOver: TypeAlias = TakenOver | Wait | Denied


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A lease, to be shown."""

    guest: str
    """Its UUID."""
    session: str
    state: str
    """free: nobody holds it; held: and there is no valid standby; protected: there is one."""
    token: int
    holder: str | None
    ttl: Seconds
    margin: Seconds
    age: Seconds
    """Since the last renewal, by the database's clock; negative: that was set back since."""
    rest: Seconds
    """How long a takeover must wait at least, as far as the database knows."""


# -- what the controller does ----------------------------------------------------------------------


def prepare(url: str) -> None:
    """Make or renew tables and functions in the database; may be repeated, by several at once.

    Its user needs CREATE on the database, and CREATEROLE for `issue`. Raises LeaseUnreachable, and
    LeaseRefused if the database cannot be a witness.
    """
    with admin(url) as connection:
        _fit(connection)
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [schema.LOCK])
        connection.execute(schema.TABLES.encode())
        found = _value(connection, "SELECT max(version) FROM vmckpt_lease.layout")
        if found is not None and found > schema.LAYOUT:
            raise LeaseRefused(
                f"the witness was prepared by a newer vmckpt (layout {found}, this one knows"
                f" {schema.LAYOUT})",
                hint="upgrade vmckpt here",
            )
        if found is not None and found < schema.LAYOUT:
            connection.execute(schema.UPGRADE.encode())
        connection.execute(schema.FUNCTIONS.encode())
        if found != schema.LAYOUT:
            connection.execute("INSERT INTO vmckpt_lease.layout VALUES (%s)", [schema.LAYOUT])


def _fit(connection: psycopg.Connection[Any]) -> None:
    if connection.info.server_version < _OLDEST:
        raise LeaseRefused("the witness needs PostgreSQL 13 or newer")
    for name in ("fsync", "full_page_writes"):
        if _value(connection, f"SHOW {name}") == "off":
            raise LeaseRefused(
                f"the witness would forget who holds a lease when its machine crashes: {name} is"
                " off there",
                hint=f"set {name} = on in postgresql.conf",
            )


def issue(url: str, guest: str, terms: LeaseTerms, session: str) -> Credential:
    """Begin a lease on a guest (its UUID) that nobody holds yet; no token is used twice.

    Raises LeaseRefused if there is one; LeaseUnreachable.
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
                f"guest {guest} has a lease already", hint="end its protection first"
            )
        # Its digest: a statement may stand in the server's log.
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
    """All that an agent's role may do."""
    database = sql.Identifier(str(_value(connection, "SELECT current_database()")))
    calls = ", ".join(f"{schema.SCHEMA}.{call}" for call in schema.AGENT_CALLS)
    return [
        (sql.SQL("CONNECT"), sql.SQL("DATABASE {}").format(database)),
        (sql.SQL("USAGE"), sql.SQL("SCHEMA vmckpt_lease")),
        (sql.SQL("EXECUTE"), sql.Composed([sql.SQL("FUNCTION "), _as_sql(calls)])),
    ]


def _as_sql(text: str) -> sql.SQL:
    return sql.SQL(text)  # made of constants


def revoke(url: str, guest: str, *, force: bool = False, session: str | None = None) -> None:
    """End a guest's lease and its login; fine if there is none.

    `session`: only if it is that one's. A watchdog kills a guest whose lease cannot be renewed any
    more, so the holder releases it first.
    Raises LeaseRefused if it may still be held, unless `force`; LeaseUnreachable.
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
                f"{holder} holds the lease on guest {guest} and has just renewed it",
                hint="end its protection there first",
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
    """A transaction of the controller, on disk when it ends. Raises LeaseUnreachable."""
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
        raise kind(f"the witness: {hidden}") from exc


def _value(connection: psycopg.Connection[Any], statement: str) -> Any:
    row = connection.execute(statement.encode()).fetchone()
    return None if row is None else row[0]


# -- what an agent does ----------------------------------------------------------------------------


class LeaseClient:
    """One host's end. Each call answers within `limit`.

    All raise LeaseUnreachable if there is no answer. Then the outcome is open for good, for what
    was sent may arrive yet: repeat a call that changes the token until it answers (the same object
    gets the token it already made), or let `invalidate` overtake it. LeaseRefused: the login
    may not do this; LeaseLost: another holds the lease by now, or with another token.
    """

    def __init__(
        self, dsn: str, *, holder: str, password: str | None = None, limit: Seconds = LIMIT,
        clock: Callable[[], Seconds] = boottime,
    ) -> None:  # fmt: skip
        """`holder`: the host's name. Raises BadInput if `dsn` cannot be read."""
        self._line = LeaseConnection(dsn, password=password, limit=limit)
        self._holder, self._clock = holder, clock
        self._name = secrets.token_hex(8)
        self._beat, self._since = "", Seconds(0.0)
        """The beat seen last, and when its first sight arrived."""
        self._timeline = ""
        """PostgreSQL's, as it was told last."""
        self.protected = False
        """Whether the witness called the standby valid, at the last renewal."""

    def close(self) -> None:
        self._line.close()

    def acquire(self) -> int:
        """Hold it, as the first or again after a restart; a standby there was is worthless then.

        Only for a guest that runs here, or is to be started here. Returns the token; `renew` next.
        The same object, asked again with nothing changed since, gets the same one.
        """
        return self._token("acquire(%s, %s)", self._holder, f"{self._name} acquire")

    def acquire_again(self, token: int) -> int:
        """The same after LeaseForgotten, which was raised for this token. Returns a newer one."""
        claim = f"{self._name} acquire after {token}"
        return self._token("acquire_again(%s, %s, %s)", self._holder, claim, token)

    def renew(self, token: int) -> Seconds | None:
        """When it was sent, by CLOCK_BOOTTIME: the guest may run for `LeaseTerms.lasts` from then.

        None: the lease is lost for good; the guest must be killed. After anything raised it runs on
        until its watchdog's time. Raises LeaseForgotten: `acquire_again` is the way on.
        """
        sent = self._clock()
        told = self._ask("renew_on(%s, %s, %s)", token, self._holder, self._timeline)
        if told.get("forgot"):
            raise LeaseForgotten(
                f"the witness has forgotten token {token}: it was failed over to a replica that"
                " lacks the last change",
                hint="make its replicas synchronous (synchronous_standby_names)",
            )
        self.protected = told.get("state") == "protected"
        return sent if told["said"] == "done" else None

    def validate(self, token: int) -> None:
        """The standby has its first epoch: it may take over, with this token."""
        self._done("validate(%s, %s)", token, self._holder)

    def invalidate(self, token: int) -> int:
        """From now on the standby may never take over; the new token. A new one is validated."""
        claim = f"{self._name} invalidate {token}"
        return self._token("invalidate(%s, %s, %s)", token, self._holder, claim)

    def hand_over(self, token: int, to: str) -> int:
        """A planned switch: `to` holds it at once; its token.

        The guest stands still here for good before this is called; and where there was no answer
        it stays so until there is one, here or from `invalidate`.
        """
        claim = f"{self._name} hand over to {to} {token}"
        told = self._ask("hand_over(%s, %s, %s, %s)", token, self._holder, to, claim)
        if told["said"] == "denied":
            raise LeaseRefused(f"it cannot be handed over: {told['why']}")
        return _token_of(told)

    def release(self, token: int) -> None:
        """Nobody holds it: for a guest whose protection ended, after its watchdog was sent away."""
        self._done("release(%s, %s)", token, self._holder)

    def take_over(self, token: int) -> TakeOver:
        """Take the lease for the standby, whose token this is, if its holder must be dead by now.

        That is when two things are so: by the database's clock the last renewal, and its own
        start, are ttl + margin ago; and this object has seen the same renewal for as long by
        its own clock. So call `look` now and then all the time, or it begins with a whole wait.
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
        """How it stands; on the standby's host this is also what watches the holder."""
        told = self._ask("look()")
        if told["said"] != "done":
            raise LeaseRefused(f"the witness refuses it: {told['why']}")
        self._seen(told["beat"])
        names = ("guest", "session", "state", "token", "holder", "ttl", "margin", "age", "rest")
        return LeaseView(**{name: told[name] for name in names})

    def _seen(self, beat: str) -> None:
        """Counted from when it arrived, for it was written before that."""
        if beat != self._beat:
            self._beat, self._since = beat, self._clock()

    def _ask(self, call: str, *arguments: object) -> dict[str, Any]:
        told = self._line.ask(f"SELECT vmckpt_lease.{call}", arguments)
        if not isinstance(told, dict):
            raise LeaseUnreachable("the witness answers in a way that is not known here")
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
