"""A lease on a new guest at a real PostgreSQL, and clients whose clocks the test moves."""

import time
import uuid

from tests.support import postgres
from vmckpt.lease import client as lease_client
from vmckpt.lease.client import Credential, LeaseClient, Wait
from vmckpt.lease.clock import boottime
from vmckpt.lease.terms import LeaseTerms
from vmckpt.units import Seconds

TERMS = LeaseTerms(ttl=Seconds(1.0), margin=Seconds(0.2))


class Protection:
    """A lease on a new guest, with clients whose clocks the test moves."""

    def __init__(self, server: postgres.Server, *, limit: float = 30.0) -> None:
        self.server, self.limit = server, limit
        self.guest = str(uuid.uuid4())
        self.ahead = 0.0
        self.stopped: float | None = None
        """Where the clients' clock stands; None: it runs."""
        self.clients: list[LeaseClient] = []
        lease_client.prepare(server.url())
        self.credential: Credential = lease_client.issue(server.url(), self.guest, TERMS, "s-1")

    def dsn(self, database: str = "postgres") -> str:
        place = self.server.url().replace("postgres@", f"{self.credential.user}@")
        return place.replace("/postgres?", f"/{database}?")

    def client(self, holder: str) -> LeaseClient:
        made = LeaseClient(
            self.dsn(), holder=holder, password=self.credential.password,
            limit=Seconds(self.limit), clock=self.clock,
        )  # fmt: skip
        self.clients.append(made)
        return made

    def clock(self) -> Seconds:
        return Seconds((self.stopped or boottime()) + self.ahead)

    def set(self, values: str) -> None:
        self.server.sql(f"UPDATE vmckpt_lease.lease SET {values} WHERE guest = '{self.guest}'")

    def get(self, column: str) -> str:
        told = f"SELECT {column} FROM vmckpt_lease.lease WHERE guest = '{self.guest}'"
        return self.server.sql(told)

    def database_clock_forward(self) -> None:
        """As long as it is about this lease: all stamps are an hour old."""
        self.set("renewed_at = renewed_at - interval '1 hour'")
        self.server.sql("UPDATE vmckpt_lease.memory SET since = since - interval '1 hour'")
        until = "SELECT pg_postmaster_start_time() < clock_timestamp() - interval '1.2 s'"
        while self.server.sql(until) != "t":
            time.sleep(0.1)


def waited(got: object) -> float:
    assert isinstance(got, Wait), got
    return got.rest


def protected(protection: Protection) -> tuple[LeaseClient, LeaseClient, int]:
    """The holder, the standby's host, and their token."""
    alpha, beta = protection.client("alpha"), protection.client("beta")
    token = alpha.acquire()
    assert alpha.renew(token)
    alpha.validate(token)
    return alpha, beta, token
