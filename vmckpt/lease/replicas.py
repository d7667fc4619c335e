"""Check whether the lease store's replicas are synchronous.

If a replica that lacks the last change to a lease were promoted, two hosts could run the same
guest. So each commit must wait for a synchronous replica, and only such a replica may be promoted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from vmckpt.errors import VmckptError
from vmckpt.lease import client
from vmckpt.model.finding import Finding, Severity
from vmckpt.units import show_count

CODE = "lease-replicas"
_WHERE = "lease store"
_SYNCHRONOUS = ("sync", "quorum")
_WAITS_FOR_NONE = ("off", "local")
_FIX = (
    "run on the lease store:"
    " ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'; SELECT pg_reload_conf();"
    " and add a second replica, so that commits continue while one replica is down"
)
# Excludes backups, logical replication and pg_receivewal, since none of these is ever promoted.
_REPLICAS = """
SELECT coalesce(r.application_name, ''), r.sync_state
  FROM pg_stat_replication r LEFT JOIN pg_replication_slots s ON s.active_pid = r.pid
 WHERE coalesce(s.slot_type, 'physical') = 'physical' AND coalesce(r.state, '') <> 'backup'
   AND coalesce(r.application_name, '') <> 'pg_receivewal'
 ORDER BY 1
"""
_AWAY = """
SELECT slot_name FROM pg_replication_slots
 WHERE slot_type = 'physical' AND NOT active AND NOT temporary ORDER BY 1
"""
_SETTINGS = """
SELECT pg_is_in_recovery(), current_setting('synchronous_commit'),
       current_setting('synchronous_standby_names'), current_user
"""


@dataclass(frozen=True, slots=True)
class Replica:
    """A server that replicates the lease store's database."""

    name: str
    """The replica's application_name; several replicas may have the same name."""
    sync: str | None
    """pg_stat_replication.sync_state; None if the login is not allowed to read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the lease store's PostgreSQL reports about its replication."""

    user: str
    follows: bool
    """Whether the server is itself a replica."""
    commit: str
    """The setting synchronous_commit, as it applies to changes to leases."""
    names: str
    """The setting synchronous_standby_names."""
    replicas: tuple[Replica, ...] = ()
    """The connected replicas."""
    away: tuple[str, ...] = ()
    """Replication slots of replicas that are not connected."""


def examine(url: str) -> Finding:
    """Ask the lease store about its replication. Returns a finding even if it does not answer."""
    try:
        with client.admin(url) as connection:
            return survives_promotion(_ask(connection))
    except VmckptError as exc:
        hint = exc.hint or "check that PostgreSQL is running there and accepts this user"
        return _finding(Severity.WARNING, f"its replicas cannot be checked: {exc.message}", hint)


def _ask(connection: psycopg.Connection[Any]) -> ServerFacts:
    (settings,) = connection.execute(_SETTINGS).fetchall()
    follows, commit, names, user = settings
    replicas = connection.execute(_REPLICAS).fetchall()
    away = connection.execute(_AWAY).fetchall()
    return ServerFacts(
        user=user, follows=follows, commit=commit, names=names.strip(),
        replicas=tuple(Replica(*row) for row in replicas), away=tuple(row[0] for row in away),
    )  # fmt: skip


def survives_promotion(seen: ServerFacts) -> Finding:
    """Return a finding on whether leases survive the promotion of a replica. Pure."""
    if seen.follows:
        return _finding(
            Severity.WARNING, "it is itself a replica, and therefore read-only",
            "in hosts.yaml, set lease: to the URL of the primary",
        )  # fmt: skip
    if not seen.replicas:
        return _judge_alone(seen)
    if any(one.sync is None for one in seen.replicas):
        return _finding(
            Severity.WARNING,
            f"it is unknown which of its replicas are synchronous: {seen.user}"
            " is not allowed to read their state",
            f'run on the lease store: GRANT pg_read_all_stats TO "{seen.user}"',
        )
    safe = [one.name for one in seen.replicas if one.sync in _SYNCHRONOUS]
    if safe and seen.commit in _WAITS_FOR_NONE:
        return _finding(
            Severity.WARNING,
            f"synchronous_commit is {seen.commit} for {seen.user}, so no commit waits for a"
            " replica",
            "connect without a pooler that ignores connection settings",
        )
    if safe:
        others = len(seen.replicas) - len(safe)
        count = show_count(len(seen.replicas), "replica")
        text = f"{len(safe)} of {count} synchronous: {_listed(safe)}"
        text += "; never promote any other replica" if others else ""
        return _finding(Severity.OK, text)
    if seen.names:
        return _waits_in_vain(seen)
    return _finding(
        Severity.WARNING,
        f"none of its replicas is synchronous ({_listed([one.name for one in seen.replicas])}): a"
        " promoted replica may lack the last change to a lease, so two copies of a guest could run",
        _FIX,
    )


def _judge_alone(seen: ServerFacts) -> Finding:
    if seen.names:
        return _waits_in_vain(seen)
    if seen.away:
        return _finding(
            Severity.WARNING,
            f"a replica is not connected (slot {_listed(seen.away)}), and commits do not wait for"
            " replicas",
            _FIX,
        )
    return _finding(
        Severity.INFO, "it has no replicas and is a single point of failure",
        "add two synchronous replicas; see docs/replication.md",
    )  # fmt: skip


def _waits_in_vain(seen: ServerFacts) -> Finding:
    return _finding(
        Severity.WARNING,
        f"no connected replica is in synchronous_standby_names ({seen.names}): every change to a"
        " lease waits until such a replica connects",
        "start a replica that is listed there, or correct synchronous_standby_names",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _finding(severity: Severity, text: str, hint: str | None = None) -> Finding:
    return Finding(code=CODE, severity=severity, where=_WHERE, text=text, hint=hint)
