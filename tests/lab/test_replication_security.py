"""Two running copies, and local users of a host: what a protection must never allow, tried."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.lab.bench import WHOLE, Bench, until
from tests.lab.protecting import (
    GUEST,
    LEFT,
    SOON,
    TTL,
    asked,
    epochs,
    imitation,
    lab_with_witness,
    left,
    ours,
    protect,
    signalled,
    tidied,
)
from tests.support.processes import command_lines
from vmckpt_lab import host
from vmckpt_lab.faults import inject

pytestmark = pytest.mark.long

AGENT, GUARD = b"vmckpt.agent.replication.main", b"vmckpt.replication.watchdog.process"


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"s{os.getpid()}") as made:
        yield made


@pytest.fixture
def pair(witnessed: Bench) -> Iterator[Bench]:
    with tidied(witnessed) as made:
        yield made


def test_a_guest_whose_agent_and_guard_are_killed_ends_with_its_lease(pair: Bench) -> None:
    """As by the out-of-memory killer, or with a session's scope: nothing starts them again."""
    pair.guest(**GUEST)
    protect(pair)
    epochs(pair)
    assert ours(pair)["enforced_by"] == "the kernel and a watchdog"
    for word in (GUARD, AGENT):
        signalled(pair, "alpha", word, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: inject.qemu(pair.plan, "web1", "alpha") is None, limit=SOON)
    lasted = time.monotonic() - killed
    assert lasted < TTL
    until(lambda: pair.where() == ["beta"], limit=SOON)
    until(lambda: (pair.seen().answered_at or 0) > killed + lasted, limit=SOON)
    found = ours(pair)
    assert found["outcome"] == "died"
    assert "its lease has expired" in found["why"]
    assert pair.ledgers() == WHOLE


def test_all_of_ours_stopped_at_once_leave_no_second_copy(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    epochs(pair)
    for word in (GUARD, AGENT):
        signalled(pair, "alpha", word, signal.SIGSTOP)
    until(lambda: inject.qemu(pair.plan, "web1", "alpha") is None, limit=SOON)
    until(lambda: pair.where() == ["beta"], limit=SOON)
    for word in (GUARD, AGENT):
        signalled(pair, "alpha", word, signal.SIGCONT)
    epoch = time.monotonic()
    until(lambda: (pair.seen().answered_at or 0) > epoch, limit=SOON)
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE


def test_a_process_that_imitates_qemu_is_not_taken_for_it(pair: Bench) -> None:
    pair.guest(**GUEST)
    uuid = pair.inside("alpha", "virsh", "domuuid", "web1").strip()
    with imitation(pair, "alpha", uuid), imitation(pair, "beta", uuid):
        protect(pair)
        epochs(pair)
        pair.good("failover", "web1", "--planned")
        assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE


def test_no_command_line_has_the_password_of_a_lease(pair: Bench) -> None:
    pair.guest(**GUEST)
    protect(pair)
    epochs(pair)
    first = host.first_process(pair.plan.host("alpha"))
    (session,) = Path(f"/proc/{first}/root{LEFT}").glob("*/session.json")
    password = urlsplit(json.loads(session.read_text())["lease"]["url"]).password
    assert password
    lines = command_lines()
    assert any(AGENT in line for line in lines.values())
    assert any(GUARD in line for line in lines.values())
    assert [line for line in lines.values() if password.encode() in line] == []


def test_a_folder_that_another_user_made_is_refused_by_name(pair: Bench) -> None:
    pair.guest(**GUEST)
    planted = "rm -rf /run/vmckpt; mkdir /run/vmckpt; chown 65534 /run/vmckpt"
    pair.inside("beta", "sh", "-c", planted)
    done = pair.run("protect", "web1", "--to", "beta", "--failover", "manual")
    assert done.code == 12
    assert len(done.err.strip().splitlines()[-1:]) == 1
    assert "/run/vmckpt belongs to user 65534" in done.err
    assert "ls -ld /run/vmckpt" in done.err
    pair.inside("beta", "rmdir", "/run/vmckpt")
    protect(pair, automatic=False)
    pair.good("unprotect", "web1")
    assert left(pair) == []


def test_one_that_is_resumed_over_and_over_stays_protected(pair: Bench) -> None:
    """Any tool that resumes paused guests does that, in the milliseconds of an epoch's pause."""
    pair.guest(**GUEST)
    protect(pair)
    epochs(pair)
    agent, over = asked(pair)["process"], threading.Event()

    def resume() -> None:
        command = host.enter(pair.plan.host("alpha"), "virsh", "-q", "resume", "web1")
        while not over.is_set():
            subprocess.run(command, capture_output=True, check=False)

    threads = [threading.Thread(target=resume) for _ in range(2)]
    for one in threads:
        one.start()
    try:
        epochs(pair, 20)
    finally:
        over.set()
        for one in threads:
            one.join()
    assert asked(pair)["process"] == agent
    epochs(pair)
    pair.good("failover", "web1", "--planned")
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE
