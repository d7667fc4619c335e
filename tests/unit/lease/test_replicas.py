"""Replicas of the lease store: said to be safe only if commits wait for one of them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import postgres
from vmckpt import inventory
from vmckpt.app import hosts
from vmckpt.doctor import gather
from vmckpt.doctor.checks import Examined
from vmckpt.lease import replicas
from vmckpt.lease.replicas import Replica, ServerFacts
from vmckpt.model.finding import Finding, Severity
from vmckpt.snapshot.prepare import Readiness

OK, INFO, WARNING = Severity.OK, Severity.INFO, Severity.WARNING


def seen(
    *syncs: str | None, names: str = "", follows: bool = False, commit: str = "on",
    away: tuple[str, ...] = (),
) -> ServerFacts:  # fmt: skip
    """Replicas are called r0, r1 and so on."""
    connected = tuple(Replica(f"r{number}", sync) for number, sync in enumerate(syncs))
    return ServerFacts(
        user="vm", follows=follows, commit=commit, names=names, replicas=connected, away=away
    )


STORIES = [
    ("one server", seen(), INFO, "it has no replicas and is a single point of failure"),
    ("one that is asynchronous", seen("async"), WARNING, "of its replicas is synchronous (r0)"),
    ("two that are", seen("async", "async"), WARNING, "replicas is synchronous (r0, r1)"),
    ("one that is synchronous", seen("sync", names="*"), OK, "1 of 1 replica synchronous: r0"),
    ("a quorum", seen("quorum", "quorum", names="ANY 1 (*)"), OK, "2 of 2 replicas synchronous"),
    (
        "one of each", seen("async", "sync", names="r1"), OK,
        "1 of 2 replicas synchronous: r1; never promote any other replica",
    ),
    (
        "the next one in line", seen("potential", "sync", names="*"), OK,
        "1 of 2 replicas synchronous: r1; never promote any other replica",
    ),
    (
        "no leave to see", seen(None, None), WARNING,
        "unknown which of its replicas are synchronous: vm is not",
    ),
    ("another name", seen("async", names="r9"), WARNING, "synchronous_standby_names (r9): every"),
    ("none is connected", seen(names="r9"), WARNING, "_standby_names (r9): every change"),
    ("one is away", seen(away=("s1",)), WARNING, "a replica is not connected (slot s1), a"),
    ("commits that wait for none", seen("sync", names="*", commit="local"), WARNING, "is local"),
    (
        "a replica itself", seen(follows=True), WARNING,
        "it is itself a replica, and therefore read-only",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "severity", "text"), [one[1:] for one in STORIES], ids=[one[0] for one in STORIES]
)
def test_what_is_said_of_replicas(facts: ServerFacts, severity: Severity, text: str) -> None:
    found = replicas.survives_promotion(facts)
    assert (found.code, found.severity) == ("lease-replicas", severity)
    assert text in found.text
    assert (found.hint is None) == (severity is OK)


@pytest.fixture(scope="module")
def primary() -> Iterator[postgres.Server]:
    """One of our own: others must not wait for its replicas."""
    server = postgres.Server()
    yield server
    server.remove()


@pytest.fixture
def replica(primary: postgres.Server) -> Iterator[postgres.Server]:
    server = postgres.Server(follows=primary, name="second", slot="second_slot")
    try:
        until(lambda: primary.sql("SELECT state FROM pg_stat_replication") == "streaming")
        yield server
    finally:
        server.remove()
        primary.sql("ALTER SYSTEM RESET synchronous_standby_names")
        primary.reload()
        until(lambda: primary.sql("SELECT active FROM pg_replication_slots") == "f")
        primary.sql("SELECT pg_drop_replication_slot('second_slot')")


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def carry_out(server: postgres.Server, finding: Finding) -> None:
    """Do what mends it, word for word."""
    assert finding.hint is not None
    told = finding.hint.removeprefix("run on the lease store: ")
    for statement in told.split("; and")[0].split(";"):
        server.sql(statement)


def test_a_server_without_replicas_is_a_single_point(primary: postgres.Server) -> None:
    found = replicas.examine(primary.url())
    assert (found.severity, found.where) == (INFO, "lease store")
    assert "single point of failure" in found.text


def test_an_asynchronous_replica_is_found_and_mended_by_what_is_said(
    primary: postgres.Server, replica: postgres.Server
) -> None:
    found = replicas.examine(primary.url())
    assert (found.severity, "none of its replicas is synchronous (second)" in found.text) == (
        WARNING, True,
    )  # fmt: skip
    carry_out(primary, found)
    until(lambda: primary.sql("SELECT sync_state FROM pg_stat_replication") == "quorum")
    # Whatever the default of others is: what is written about leases waits.
    found = replicas.examine(primary.url(synchronous_commit="off"))
    assert (found.severity, found.text) == (OK, "1 of 1 replica synchronous: second")
    assert replicas.examine(replica.url()).text.startswith("it is itself a replica")
    replica.stop()
    until(lambda: primary.sql("SELECT count(*) FROM pg_stat_replication") == "0")
    found = replicas.examine(primary.url())
    assert (found.severity, "every change to a lease waits" in found.text) == (WARNING, True)


def test_one_that_is_away_is_known_by_its_slot(
    primary: postgres.Server, replica: postgres.Server
) -> None:
    replica.stop()
    until(lambda: primary.sql("SELECT active FROM pg_replication_slots") == "f")
    found = replicas.examine(primary.url())
    assert (found.severity, "not connected (slot second_slot)" in found.text) == (WARNING, True)


def test_without_leave_to_see_it_is_unknown(
    primary: postgres.Server, replica: postgres.Server
) -> None:
    url = primary.url().replace("postgres@/", "carl@/")
    with primary.asking("carl", "geheim7"):
        login = url.replace("carl@/", "carl:geheim7@/")
        found = replicas.examine(login)
        assert (
            found.severity,
            "it is unknown which of its replicas are synchronous: carl is not allowed to read their"
            " state" in found.text,
        ) == (WARNING, True)
        carry_out(primary, found)
        assert "none of its replicas is synchronous (second)" in replicas.examine(login).text
        wrong = replicas.examine(url.replace("carl@/", "carl:wrong7@/"))
    assert (wrong.severity, "its replicas cannot be checked" in wrong.text) == (WARNING, True)
    assert "wrong7" not in f"{wrong.text} {wrong.hint}"


def test_a_server_that_does_not_answer_is_a_finding() -> None:
    found = replicas.examine("postgresql://vm@127.0.0.1:1/vm")
    assert (found.severity, "its replicas cannot be checked: " in found.text) == (WARNING, True)
    assert found.hint is not None


async def test_doctor_and_prepare_tell_it(
    primary: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*_: object) -> list[Examined]:
        return []

    monkeypatch.setattr(gather, "examine", none)
    # The parser wants a witness that hosts can reach; this one is on a socket.
    text = "hosts: {alpha: {uri: 'qemu:///system'}}\nlease: postgresql://u@witness/d\n"
    known = replace(inventory.parse(text, Path("hosts.yaml")), lease=primary.url())
    (found,) = await hosts.doctor(known, [])
    assert (found.code, found.severity) == ("lease-replicas", INFO)
    ready = Readiness(guest="web1", host="alpha", findings=(), lacks=False, restart=False)
    assert (await hosts._with_lease_store(known, ready)).findings == (found,)
