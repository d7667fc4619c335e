"""Hosts are emptied and filled again, whatever is killed or cut meanwhile."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.lab.bench import (
    BUSY,
    WHOLE,
    Bench,
    Done,
    finish,
    first_line,
    migrate,
    traces,
    until,
    uuid,
)
from vmckpt.units import parse_rate
from vmckpt_lab import guests, host, lab, network

SMALL = {"memory": "128MiB", "dirty": "8MiB@1MiB/s", "disk": "16MiB"}


@pytest.fixture
def bench(bench: Bench) -> Iterator[Bench]:
    """A test that failed leaves no host in maintenance to the next."""
    yield bench
    for one in bench.good("maintenance", "list", "--json").json:
        bench.good("maintenance", "leave", one["host"])


@pytest.fixture(scope="module")
def rack() -> Iterator[Bench]:
    """Three hosts."""
    name = f"e{os.getpid()}"
    plan = lab.up(name, hosts=3)
    yield Bench(plan)
    lab.down(name)
    assert traces(f"{name}/") + traces(f"{name}.") == []


@pytest.fixture
def three(rack: Bench) -> Iterator[Bench]:
    """Those, healed afterwards, without guests and out of maintenance."""
    yield rack
    for one in rack.plan.hosts:
        lab.heal(rack.plan, one.name)
    rack.run("recover")
    for one in rack.good("maintenance", "list", "--json").json:
        rack.good("maintenance", "leave", one["host"])
    for guest in guests.stored(rack.plan):
        guests.remove(rack.plan, guest.name)


def on(bench: Bench, *names: str) -> dict[str, list[str]]:
    """Where each guest is."""
    return {name: bench.where(name) for name in names}


def shape(bench: Bench, rate: int | None) -> None:
    for one in bench.plan.hosts:
        network.shape(bench.plan, one.name, None if rate is None else parse_rate(f"{rate}mbit"))


@pytest.mark.long
def test_a_host_is_emptied_and_filled_again(bench: Bench) -> None:
    """Two hosts and two guests: the plan, the run, the host that is closed, and the way back."""
    for name in ("web1", "web2", "off1"):
        bench.guest(name, **SMALL)
    bench.inside("alpha", "virsh", "destroy", "off1")
    plan = bench.good("evacuate", "alpha", "--dry-run", "--json").json
    assert {(one["guest"], one["to"], one["mode"] == "offline") for one in plan["moves"]} == {
        ("web1", "beta", False), ("web2", "beta", False), ("off1", "beta", True),
    }  # fmt: skip
    assert plan["left"] == []
    # No migration between these hosts has been measured yet.
    assert plan["total_ms"][0] > 0
    assert plan["total_ms"][1] is None
    assert all(one["policy"] == "maintenance" for one in plan["moves"])
    assert all(one["expected_ms"] for one in plan["moves"] if one["mode"] != "offline")
    assert on(bench, "web1", "web2") == {"web1": ["alpha"], "web2": ["alpha"]}
    assert bench.good("maintenance", "list", "--json").json == []

    done = bench.good("evacuate", "alpha", "--yes", "--why", "new memory", "--json").json
    assert done["outcome"] == "completed"
    assert {one["guest"] for one in done["moved"]} == {"web1", "web2", "off1"}
    assert bench.inside("alpha", "virsh", "list", "--all", "--name").split() == []
    assert plan["total_ms"][0] / 3 <= done["total_ms"]
    assert on(bench, "web1", "web2") == {"web1": ["beta"], "web2": ["beta"]}

    (held,) = bench.good("maintenance", "list", "--json").json
    assert (held["host"], held["why"]) == ("alpha", "new memory")
    refused = migrate(bench, "alpha")
    assert refused.code == 21
    assert "host-in-maintenance" in refused.out
    assert bench.run("cancel", held["job"]).code == 2
    assert bench.run("recover", "--json").code == 0
    jobs = bench.good("jobs", "--all", "--json").json
    assert {one["detail"].get("part_of") for one in jobs if one["kind"] == "migrate"} >= {
        done["job"]
    }

    (step,) = bench.good("job", done["job"], "--json").json["steps"]
    assert (step["name"], step["intent"]["guest"], step["state"]) == ("move", "off1", "done")

    back = bench.good("repopulate", "alpha", "--yes", "--json").json
    assert {one["guest"] for one in back["moved"]} == {"web1", "web2", "off1"}
    assert on(bench, "web1", "web2") == {"web1": ["alpha"], "web2": ["alpha"]}
    assert "off1" in bench.inside("alpha", "virsh", "list", "--inactive", "--name").split()
    assert bench.good("maintenance", "list", "--json").json == []
    for name in ("web1", "web2"):
        assert bench.ledgers(name) == WHOLE


@pytest.mark.long
def test_what_cannot_be_done_is_said_before_anything_is_changed(bench: Bench) -> None:
    bench.guest("web1", **SMALL)
    bench.guest("web2", private_disk=True, **SMALL)
    for words, code, said in (
        (("evacuate", "nohost", "--yes"), 3, "nohost"),
        (("evacuate", "alpha"), 2, "--yes"),
        (("evacuate", "alpha", "--to", "alpha", "--yes"), 2, "other hosts"),
        (("evacuate", "alpha", "--policy", "maintainance", "--yes"), 4, "maintenance"),
        (("evacuate", "alpha", "--yes"), 21, "web2"),
        (("repopulate", "beta", "--yes"), 2, "no guest was moved"),
        (("maintenance", "leave", "alpha"), 2, "not in maintenance"),
    ):
        done = bench.run(*words)
        assert (done.code, said in done.err.splitlines()[-1]) == (code, True), done.err
    assert on(bench, "web1", "web2") == {"web1": ["alpha"], "web2": ["alpha"]}
    assert bench.good("maintenance", "list", "--json").json == []

    partly = bench.run("evacuate", "alpha", "--yes", "--partly", "--json")
    assert partly.code == 26, partly.err
    assert [one["guest"] for one in partly.json["left"]] == ["web2"]
    assert "web2.raw" in partly.json["left"][0]["why"]
    assert on(bench, "web1", "web2") == {"web1": ["beta"], "web2": ["alpha"]}
    bench.good("maintenance", "leave", "alpha")


@pytest.mark.long
def test_controller_target_and_link_die_and_everybody_runs_once(three: Bench) -> None:
    """A target is switched off as its first guest is on its way; the controller is killed; while
    the next one goes on, the link is cut for a while."""
    names = [f"web{number}" for number in range(1, 6)]
    for name in names:
        three.guest(name, **SMALL)
    shape(three, 100)
    running = three.start("evacuate", "alpha", "--yes", "--json")
    said = first_line(running, "→ gamma: begins")
    host.power_off(three.plan.host("gamma"))
    # Two guests may be on their way there. If the controller died before it recorded the second
    # failure, it would be unknown whether gamma had received all of that guest's memory.
    while not 0 < count(said, "→ gamma: begins") == count(said, "→ gamma: failed"):
        said += first_line(running, "→ gamma: ")
    running.send_signal(signal.SIGKILL)
    finish(running)
    assert len(three.good("jobs", "--json").json) >= 2
    recovering = three.start("recover", "--json")
    until(lambda: bool(moving(three, names)), limit=60)
    network.cut(three.plan, "beta")
    time.sleep(4)  # for as long as it is cut
    network.heal(three.plan, "beta")
    done = finish(recovering, limit=400)
    shape(three, None)
    assert done.code == 0, done.err
    found = on(three, *names)
    assert found == {name: ["beta"] for name in names}, done.out + done.err
    assert [one["kind"] for one in three.good("jobs", "--json").json] == ["maintenance"]
    for name in names:
        assert three.ledgers(name) == WHOLE
    (whole,) = [one for one in done.json if one["kind"] == "evacuate"]
    assert whole["outcome"] == "completed"


def count(lines: list[str], words: str) -> int:
    return sum(words in line for line in lines)


def moving(bench: Bench, names: list[str]) -> list[str]:
    """Guests that are on their way."""
    listed = bench.inside("alpha", "virsh", "list", "--name").split()
    found = []
    for name in set(listed) & set(names):
        told = bench.inside("alpha", "virsh", "domjobinfo", name)
        if "None" not in told.splitlines()[0]:
            found.append(name)
    return found


@pytest.mark.long
def test_copies_on_a_third_host_are_destroyed_but_for_the_correct_one(three: Bench) -> None:
    three.guest("web1", **BUSY)
    shape(three, 60)
    running = three.start("migrate", "web1", "--to", "beta", "--mode", "precopy")
    first_line(running, "iteration=1")
    running.kill()
    finish(running)
    three.inside("alpha", "virsh", "domjobabort", "web1")
    shape(three, None)
    copy = three.plan.shared / "copy.xml"
    copy.write_text(
        f"<domain type='qemu'><name>web1</name><uuid>{uuid(three)}</uuid>"
        "<memory unit='MiB'>32</memory><os><type arch='x86_64'>hvm</type></os></domain>"
    )
    three.inside("gamma", "virsh", "create", str(copy))
    copy.unlink()
    (found,) = three.run("recover", "--json").json
    assert (found["outcome"], "copy of the guest on gamma" in found["truth"]) == (None, True)
    three.follow(found["settle"], at="gamma", GUEST="web1")
    assert [one["outcome"] for one in three.good("recover", "--json").json] == ["failed"]
    assert on(three, "web1") == {"web1": ["alpha"]}


@pytest.mark.long
def test_interrupted_it_lets_arrive_what_is_on_its_way(three: Bench) -> None:
    names = [f"web{number}" for number in range(1, 5)]
    for name in names:
        three.guest(name, **SMALL)
    shape(three, 100)
    running = three.start("evacuate", "alpha", "--yes", "--json")
    first_line(running, "begins")
    running.send_signal(signal.SIGINT)
    done = finish(running)
    shape(three, None)
    assert done.code == 26, done.err
    moved = {one["guest"] for one in done.json["moved"]}
    assert moved
    assert {one["guest"] for one in done.json["left"]} == set(names) - moved
    assert {name for name, at in on(three, *names).items() if at == ["alpha"]} == set(names) - moved
    three.follow(done.json["left"][0]["hint"], "--yes")
    assert all(at != ["alpha"] and len(at) == 1 for at in on(three, *names).values())
    back = three.good("repopulate", "alpha", "--yes", "--json").json
    assert {one["guest"] for one in back["moved"]} == set(names)


@pytest.mark.long
def test_one_move_is_cancelled_and_the_others_go_on(three: Bench) -> None:
    for name in ("web1", "web2", "web3"):
        three.guest(name, **SMALL)
    shape(three, 60)
    running = three.start("evacuate", "alpha", "--yes", "--json")
    until(lambda: bool(moving(three, ["web1", "web2", "web3"])), limit=60)
    (name, *_) = moving(three, ["web1", "web2", "web3"])
    jobs = three.good("jobs", "--guest", name, "--json").json
    three.good("cancel", jobs[0]["job"])
    done = finish(running)
    shape(three, None)
    assert done.code == 26, done.err
    assert [one["guest"] for one in done.json["left"]] == [name]
    assert len(done.json["moved"]) == 2
    assert on(three, name) == {name: ["alpha"]}
    assert three.ledgers(name) == WHOLE


@pytest.mark.long
def test_paused_from_another_terminal_and_shut_down_by_policy(three: Bench) -> None:
    for name in ("web1", "web2", "web3"):
        three.guest(name, **SMALL)
    folder = three.plan.folder / "policies"
    folder.mkdir(exist_ok=True)
    (folder / "quiet.yaml").write_text(
        "version: vmckpt/v1\nname: quiet\nselect: {guests: [web3]}\n"
        "evacuate: {strategy: shutdown-and-return, shutdown: 5s}\n"
    )
    try:
        running = three.start("evacuate", "alpha", "--yes", "--json", "--policies", str(folder))
        first_line(running, "begins")
        answered = threading.Event()
        told: list[Done] = []

        def ask() -> None:
            told.append(three.run("pause", "alpha"))
            told.append(three.run("resume", "alpha"))
            answered.set()

        threading.Thread(target=ask).start()
        done = finish(running)
        until(answered.is_set, limit=60.0)
    finally:
        (folder / "quiet.yaml").unlink()
    # The lab's guests do not hear their power button: it is left, running, and it is said so.
    assert done.code == 26, done.err
    (left,) = done.json["left"]
    assert (left["guest"], left["why"]) == ("web3", "web3 on alpha did not shut down within 5.0 s")
    assert on(three, "web3") == {"web3": ["alpha"]}
    assert {one["guest"] for one in done.json["moved"]} == {"web1", "web2"}
    assert all(one.code == 0 for one in told), told


@pytest.mark.long
def test_a_guest_is_kept_as_it_stands_until_its_host_is_back(three: Bench) -> None:
    three.guest("web1", **SMALL)
    folder = three.plan.folder / "policies"
    folder.mkdir(exist_ok=True)
    kept = folder / "kept.yaml"
    kept.write_text(
        "version: vmckpt/v1\nname: kept\nselect: {guests: [web1]}\n"
        "evacuate: {strategy: suspend-to-snapshot}\n"
    )
    try:
        done = three.good("evacuate", "alpha", "--yes", "--json", "--policies", str(folder)).json
    finally:
        kept.unlink()
    assert done["shut_down"] == done["suspended"] != []
    assert (done["moved"], done["left"]) == ([], [])
    assert three.where() == []
    assert "Managed save:   yes" in three.inside("alpha", "virsh", "dominfo", "web1")
    before = three.seen().highest
    assert three.good("repopulate", "alpha", "--yes", "--json").json["started"] == ["web1"]
    until(lambda: three.seen().highest > before)
    assert on(three, "web1") == {"web1": ["alpha"]}
    assert three.ledgers() == WHOLE


@pytest.mark.long
def test_a_standby_is_to_wait_elsewhere(three: Bench) -> None:
    """Its guest runs on where it is, and is protected by another host on the same terms."""
    three.guest("web1", "alpha", **SMALL, shared_memory=True, private_disk=True)
    how = ("--interval", "300ms", "--failover", "manual")
    three.good("protect", "web1", "--to", "beta", *how)
    plan = three.good("evacuate", "beta", "--dry-run", "--json").json
    assert [(one["guest"], one["to"], one["mode"]) for one in plan["moves"]] == [
        ("web1 on beta", "gamma", "protect anew")
    ]
    done = three.good("evacuate", "beta", "--yes", "--json").json
    assert [(one["to"], one["standby"]) for one in done["moved"]] == [("gamma", True)]
    assert (done["left"], done["unprotected"]) == ([], [])
    assert on(three, "web1") == {"web1": ["alpha"]}
    (kept,) = three.good("status", "--json").json
    assert (kept["backup"], kept["says"]["alpha"]["phase"]) == ("gamma", "protecting")
    refused = three.run("repopulate", "beta", "--yes")
    assert "no guest was moved away" in refused.err  # nobody is migrated for having a standby
    three.good("maintenance", "leave", "beta")
    three.good("unprotect", "web1")
    assert three.ledgers() == WHOLE


@pytest.mark.long
def test_host_after_host(three: Bench) -> None:
    """Each is emptied, does what it is told, and gets its guests back."""
    three.guest("web1", "alpha", **SMALL)
    three.guest("web2", "beta", **SMALL)
    mark = three.plan.folder / "rolled"
    order = f"hostname >> {mark}"
    around = ("--before", f"echo before >> {mark}", "--after", f"echo after >> {mark}")
    done = three.good("roll", "alpha", "beta", "--run", order, *around, "--yes", "--json").json
    assert [one["host"] for one in done] == ["alpha", "beta"]
    assert on(three, "web1", "web2") == {"web1": ["alpha"], "web2": ["beta"]}
    said = ["before", "alpha", "after", "before", "beta", "after"]
    assert mark.read_text().split() == said
    assert three.good("maintenance", "list", "--json").json == []
    for name in ("web1", "web2"):
        assert three.ledgers(name) == WHOLE
    refused = three.run("roll", "alpha", "--before", "exit 3", "--run", order, "--yes")
    assert (refused.code, mark.read_text().split()) == (24, said)
    assert three.good("maintenance", "list", "--json").json == []
    failed = three.run("roll", "alpha", "beta", "--run", "echo no room >&2; exit 3", "--yes")
    assert failed.code == 24
    assert "no room" in failed.err
    (held,) = three.good("maintenance", "list", "--json").json
    assert held["host"] == "alpha"
    assert three.where("web1") != ["alpha"]
    three.good("repopulate", "alpha", "--yes")
    assert on(three, "web1", "web2") == {"web1": ["alpha"], "web2": ["beta"]}


@pytest.mark.long
def test_a_host_that_goes_down_and_comes_back_is_filled_again(three: Bench) -> None:
    """Its command ends with the host, as a reboot does."""
    three.guest("web1", "alpha", **SMALL)
    mark = three.plan.folder / "going-down"
    rolling = three.start("roll", "alpha", "--run", f"touch {mark}; sleep 600", "--yes", "--json")
    until(mark.exists, limit=60)
    host.power_off(three.plan.host("alpha"))
    time.sleep(3)  # for as long as it is off; nothing is given up
    assert rolling.poll() is None
    lab.heal(three.plan, "alpha")
    done = finish(rolling, limit=180)
    assert done.code == 0, done.err
    assert on(three, "web1") == {"web1": ["alpha"]}
    assert three.ledgers() == WHOLE
    assert three.good("maintenance", "list", "--json").json == []
