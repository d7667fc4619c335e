"""A failover that is only tested: a copy of the standby runs beside a protection that goes on."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import proving
from tests.lab.bench import WHOLE, Bench, finish, traces, until
from tests.lab.protecting import GUEST, LEFT, SOON, agent, epochs, left, on_qemu, protect, theirs
from vmckpt.errors import RemoteError
from vmckpt.replication import control_socket
from vmckpt_lab import guests, host, lab, ledger
from vmckpt_lab.machine_speed import slowness

COPY = "web1-test"
QCOW2 = {**GUEST, "disk_format": "qcow2"}


@pytest.fixture(scope="module")
def tried() -> Iterator[Bench]:
    """A lab with a witness, for all tests here."""
    name = f"y{os.getpid()}"
    plan = lab.up(name, hosts=2, with_witness=True)
    yield Bench(plan)
    lab.down(name)
    assert traces(f"{name}/") + traces(f"{name}.") == []


@pytest.fixture
def duo(tried: Bench) -> Iterator[Bench]:
    yield tried
    tried.run("unprotect", "web1")
    for one in tried.plan.hosts:
        lab.heal(tried.plan, one.name)
    tried.run("recover")
    for guest in guests.stored(tried.plan):
        guests.remove(tried.plan, guest.name)


def qmp(bench: Bench, guest: str, command: str, **arguments: object) -> Any:
    text = json.dumps({"execute": command, "arguments": arguments})
    told = bench.inside("beta", "virsh", "qemu-monitor-command", guest, text)
    return json.loads(told)["return"]


def remains(bench: Bench, *, standby: bool) -> list[str]:
    """What of a test is on the backup; `standby`: there still is one."""
    shell = (
        f"find {bench.plan.shared} {bench.plan.private} {bench.plan.host('beta').root}/agent"
        r" \( -name '*vmckpt-test*' -o -name 'test.json*' \);"
        f" find /dev/shm/ram -name '*{COPY}*'; virsh list --all --name | grep test || true"
    )
    found = bench.inside("beta", "sh", "-c", shell).split()
    if standby:
        found += [one["device"] for one in qmp(bench, "web1", "query-block-jobs")]
        names = [one["id"] for one in qmp(bench, "web1", "query-block-exports")]
        names += [
            one["node-name"] for one in qmp(bench, "web1", "query-named-block-nodes", flat=True)
        ]
        found += [one for one in names if "vmckpt-test" in one]
    return found


def begin(bench: Bench) -> dict[str, Any]:
    return dict(bench.good("failover", "web1", "--test", "--json").json)


def written(bench: Bench) -> int:
    """How often the copy has written to its disk; not once in vain."""
    (one,) = qmp(bench, COPY, "query-blockstats")
    assert one["stats"]["failed_wr_operations"] == one["stats"]["failed_rd_operations"] == 0
    return int(one["stats"]["wr_operations"])


def said(bench: Bench, name: str) -> dict[str, Any]:
    """What an agent says, asked without a detour; nothing if there is none just now."""
    try:
        root = Path(f"/proc/{agent(bench, name)}/root{LEFT}")
        return control_socket.ask(next(root.iterdir()), {})
    except (AssertionError, OSError, StopIteration, RemoteError):
        return {}


def goes_on(bench: Bench) -> None:
    """Epochs are committed, on both hosts."""
    until(lambda: bool(said(bench, "beta").get("ready")), limit=SOON)
    before = said(bench, "beta")["committed"]
    until(lambda: said(bench, "beta").get("committed", 0) > before + 3, limit=SOON)
    until(lambda: said(bench, "alpha").get("phase") == "protecting", limit=SOON)
    until(lambda: said(bench, "alpha").get("epoch", 0) > before + 3, limit=SOON)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [pytest.param(GUEST, id="raw", marks=pytest.mark.campaign), pytest.param(QCOW2, id="qcow2")],
)
def test_a_copy_lives_beside_the_protection_and_leaves_nothing(
    duo: Bench, kind: dict[str, Any]
) -> None:
    duo.guest(**kind)
    protect(duo)
    epochs(duo)
    assert remains(duo, standby=True) == []
    seen = duo.seen()
    told = begin(duo)
    assert (told["name"], told["host"], told["runs"]) == (COPY, "beta", True)
    assert told["epoch"] > 1
    test = theirs(duo)["test"]
    assert (test["state"], test["epoch"], test["uuid"]) == ("runs", told["epoch"], told["uuid"])
    assert test["held_s"] < 0.25 * slowness()
    listed = {(one["name"], one["host"]): one["state"] for one in duo.good("guests", "--json").json}
    # A protected guest may be seen in one of its pauses.
    assert listed.pop(("web1", "alpha")) in ("running", "paused")
    assert listed == {("web1", "beta"): "standby", (COPY, "beta"): "test"}
    refused = duo.run("failover", "web1", "--test")
    assert (refused.code, len(refused.err.splitlines())) == (18, 1)
    assert "is already running" in refused.err
    assert duo.run("migrate", COPY, "--to", "alpha").code != 0

    # It lives, and the protection does.
    before = written(duo)
    goes_on(duo)
    until(lambda: written(duo) > before + 10, limit=SOON)
    assert qmp(duo, COPY, "query-status")["status"] == "running"
    assert "down" in duo.inside("beta", "virsh", "domif-getlink", COPY, "52:54:00:" + mac(duo))
    assert duo.where() == ["alpha"]
    no_page_is_torn(duo, told["uuid"])
    no_record_is_lost(duo, seen.run, seen.highest)

    ended = duo.good("failover", "web1", "--end-test", "--json").json
    assert (ended["name"], ended["runs"]) == (COPY, False)
    assert said(duo, "beta")["test"] is None
    assert remains(duo, standby=True) == []
    goes_on(duo)
    assert duo.ledgers() == WHOLE
    assert duo.run("failover", "web1", "--end-test").code == 18
    duo.good("unprotect", "web1")
    assert left(duo) + remains(duo, standby=False) == []
    assert on_qemu(duo, "alpha") == []


def mac(bench: Bench) -> str:
    """The end of the guest's MAC."""
    address = guests.find(bench.plan, "web1").address
    return ":".join(f"{int(part):02x}" for part in address.split(".")[1:])


def no_page_is_torn(bench: Bench, uuid: str) -> None:
    """The copy's memory is of one instant, and goes on from there."""
    pages = guests.find(bench.plan, "web1").dirty // 4096
    found = []
    for _ in range(2):
        bench.inside("beta", "virsh", "suspend", COPY)
        found.append(proving.read(uuid, pages))
        bench.inside("beta", "virsh", "resume", COPY)
        wrote = written(bench)
        until(lambda: written(bench) > wrote + 10, limit=SOON)  # noqa: B023
    assert [one.pages for one in found] == [pages, pages]
    assert all(one.broken <= 1 for one in found)  # it may stand still in the middle of a page
    assert found[1].written > found[0].written > 0


def no_record_is_lost(bench: Bench, run: int, highest: int) -> None:
    """The copy's disk has all that the guest had told before, and no record is broken."""
    bench.inside("beta", "virsh", "suspend", COPY)
    overlay = bench.inside("beta", "virsh", "domblklist", COPY).split()[-1]
    out = f"{bench.plan.private}/copy.raw"
    bench.inside("beta", "qemu-img", "convert", "-U", "-f", "qcow2", "-O", "raw", overlay, out)
    seen_from_here = bench.plan.host("beta").root / "private" / "copy.raw"
    records = ledger.read_records(seen_from_here.read_bytes(), run, highest)
    seen_from_here.unlink()
    assert records.broken == 0
    assert records.highest >= highest > 0
    bench.inside("beta", "virsh", "resume", COPY)


@pytest.mark.long
def test_a_copy_that_is_destroyed_or_whose_agent_is_killed_is_tidied(duo: Bench) -> None:
    duo.guest(**GUEST)
    protect(duo)
    begin(duo)
    duo.inside("beta", "virsh", "destroy", COPY)
    until(lambda: said(duo, "beta").get("test", COPY) is None, limit=SOON)
    assert remains(duo, standby=True) == []
    goes_on(duo)

    begin(duo)
    os.kill(agent(duo, "beta"), signal.SIGKILL)
    until(lambda: remains(duo, standby=True) == [], limit=SOON)
    goes_on(duo)

    # In the middle of its making.
    making = duo.start("failover", "web1", "--test")
    until(lambda: (said(duo, "beta").get("test") or {}).get("name") == COPY, limit=SOON)
    os.kill(agent(duo, "beta"), signal.SIGKILL)
    assert finish(making).code == 1
    goes_on(duo)
    assert (said(duo, "beta")["test"], remains(duo, standby=True)) == (None, [])
    assert duo.ledgers() == WHOLE


@pytest.mark.long
def test_a_failover_does_not_wait_for_a_test_and_leaves_nothing_of_it(duo: Bench) -> None:
    duo.guest(**GUEST)
    protect(duo)
    begin(duo)
    goes_on(duo)
    died = time.monotonic()
    host.power_off(duo.plan.host("alpha"))
    until(lambda: (duo.seen().answered_at or 0) > died + 0.2, limit=SOON)
    assert duo.where() == ["beta"]
    told = theirs(duo)
    assert told["outcome"] == "failed-over"
    (told_of,) = duo.good("status", "--json").json
    assert told_of["end"].startswith("failed over at ")
    assert told_of["next_step"].startswith("run vmckpt recover; once alpha is up again")
    assert "not ready" not in duo.good("status").out
    took = float(told["why"].split("running after ")[1].split(" ms")[0])
    assert took < 500 * slowness()
    until(lambda: remains(duo, standby=True) == [], limit=SOON)
    assert duo.ledgers() == WHOLE
    lab.heal(duo.plan, "alpha")
    done = duo.good("recover", "--json").json
    assert [one["outcome"] for one in done] == ["completed"]
    assert left(duo) + remains(duo, standby=True) == []


@pytest.mark.campaign
@pytest.mark.long
def test_a_planned_switch_with_a_test_loses_nothing(duo: Bench) -> None:
    duo.guest(**QCOW2)
    protect(duo, automatic=False)
    begin(duo)
    done = duo.good("failover", "web1", "--planned", "--json").json
    assert done["runs_on"] == "beta"
    assert left(duo) + remains(duo, standby=True) == []
    assert duo.where() == ["beta"]
    assert duo.ledgers() == WHOLE
    assert on_qemu(duo, "beta") == []


@pytest.mark.campaign
@pytest.mark.long
def test_a_backup_that_is_started_anew_keeps_no_images_of_a_test(duo: Bench) -> None:
    duo.guest(**GUEST)
    protect(duo)
    begin(duo)
    host.power_off(duo.plan.host("beta"))
    lab.heal(duo.plan, "beta")
    assert any("vmckpt-test" in one for one in remains(duo, standby=False))
    until(lambda: said(duo, "alpha").get("phase") == "alone", limit=SOON)
    duo.good("unprotect", "web1")
    assert left(duo) + remains(duo, standby=False) == []
    assert duo.where() == ["alpha"]
    assert duo.ledgers() == WHOLE


@pytest.mark.campaign
def test_without_room_for_a_copy_nothing_is_begun(duo: Bench) -> None:
    duo.guest(**GUEST)
    protect(duo)
    stat = os.statvfs(Path(f"/proc/{agent(duo, 'beta')}/root/dev/shm"))
    used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
    small = used + (300 << 20)
    duo.inside("beta", "mount", "-o", f"remount,size={small}", "/dev/shm")
    refused = duo.run("failover", "web1", "--test")
    duo.inside("beta", "mount", "-o", "remount,size=50%", "/dev/shm")
    assert (refused.code, len(refused.err.splitlines())) == (18, 1)
    assert "on the tmpfs for memory" in refused.err
    assert said(duo, "beta")["test"] is None
    assert remains(duo, standby=True) == []
    begin(duo)
    duo.good("unprotect", "web1")
    assert left(duo) + remains(duo, standby=False) == []
    assert duo.where() == ["alpha"]
    assert duo.ledgers() == WHOLE
