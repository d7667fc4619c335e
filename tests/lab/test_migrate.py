"""vmckpt migrate, from the command line, on real hosts."""

import signal
from contextlib import suppress
from typing import Any

import pytest

from tests.lab.bench import BUSY, SLOW, WHOLE, Bench, code_of, finish, first_line, migrate, until
from tests.support.doc_examples import shown
from vmckpt.hypervisor.domains import find_guest
from vmckpt.units import parse_rate
from vmckpt_lab import network
from vmckpt_lab.machine_speed import slowness

SHORT = ("--max-downtime", "20ms")
# Converges also beside other tests: of a post-copy libvirt 9.0 keeps no statistics.
CALM = "32MiB@2MiB/s"


def limit_on(bench: Bench, host: str = "alpha") -> str:
    return bench.inside(host, "virsh", "-q", "migrate-getmaxdowntime", "web1").strip()


def test_a_guest_moves_and_nothing_is_lost(bench: Bench) -> None:
    bench.guest(dirty=CALM)
    report = bench.good("migrate", "web1", "--to", "beta", "--json").json

    assert (report["outcome"], report["source"], report["target"]) == ("completed", "alpha", "beta")
    assert (report["mode"], report["driver"]) == ("hybrid", "peer-to-peer")
    assert report["iterations"] >= 2
    assert report["bytes_transferred"] > 64 << 20
    assert 0 < report["downtime_ms"] < 1500 * slowness()
    assert report["setup_ms"] is not None
    assert report["observed_downtime_ms"] > 5
    assert report["samples"]
    assert report["warnings"] == []
    assert bench.where() == ["beta"]
    assert bench.ledgers() == WHOLE
    assert bench.inside("alpha", "virsh", "list", "--all", "--name").split() == []
    assert bench.inside("beta", "virsh", "list", "--persistent", "--name").split() == ["web1"]


@pytest.mark.long
def test_a_transient_guest_stays_transient_and_autostart_moves_along(bench: Bench) -> None:
    bench.guest("web1")
    bench.guest("web2")
    bench.inside("alpha", "virsh", "-q", "undefine", "web1")
    bench.inside("alpha", "virsh", "-q", "autostart", "web2")
    for name in ("web1", "web2"):
        bench.good("migrate", name, "--to", "beta")

    assert bench.inside("beta", "virsh", "list", "--persistent", "--name").split() == ["web2"]
    assert bench.inside("beta", "virsh", "list", "--autostart", "--name").split() == ["web2"]


@pytest.mark.campaign
@pytest.mark.parametrize("rounds", [2, 10])
def test_many_moves_leave_the_ledgers_whole_and_nothing_behind(bench: Bench, rounds: int) -> None:
    bench.guest()

    def remains(host: str) -> set[str]:
        files = bench.inside(host, "find", "/run/libvirt", "/var/lib/libvirt", "/dev/shm", "/tmp")
        return {"qemu" if "qemu-system" in line else line
                for line in (*files.split("\n"), *bench.inside(host, "ps", "-eo", "comm").split())
                if "ps" not in line and "find" not in line and "sleep" not in line}  # fmt: skip

    bench.good("migrate", "web1", "--to", "beta", "--probe", "off")
    bench.good("migrate", "web1", "--to", "alpha", "--probe", "off")
    before = {host: remains(host) for host in ("alpha", "beta")}
    for _ in range(rounds):
        bench.good("migrate", "web1", "--to", "beta", "--probe", "off")
        bench.good("migrate", "web1", "--to", "alpha", "--probe", "off")

    assert bench.ledgers() == WHOLE

    def nameless(names: set[str]) -> set[str]:
        # QEMU's own sockets and folders carry the guest's running number.
        return {name for name in names if "domain-" not in name and "-web1" not in name}

    def settled() -> dict[str, set[str]]:
        return {host: nameless(remains(host)) for host in before}

    wanted = {host: nameless(names) for host, names in before.items()}
    # A login or a look at a host may take a moment to be gone.
    with suppress(AssertionError):
        until(lambda: settled() == wanted)
    assert settled() == wanted
    # What earlier tests left there libvirt may have cleared away meanwhile.
    assert len(remains("beta")) <= len(before["beta"])


def test_ctrl_c_cancels_and_the_guest_runs_on_the_source(bench: Bench) -> None:
    bench.guest(**BUSY)
    network.shape(bench.plan, "alpha", SLOW)
    usual = limit_on(bench)
    process = bench.start("migrate", "web1", "--to", "beta", "--json", "--mode", "precopy", *SHORT)
    first_line(process, "iteration=2")
    process.send_signal(signal.SIGINT)
    first_line(process, "stopping")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    done = finish(process)

    assert done.code == 130
    assert "error: cancelled; web1 is running on alpha" in done.err
    assert done.json["outcome"] == "cancelled"
    assert [d["action"] for d in done.json["decisions"]] == ["abort"]
    assert bench.where() == ["alpha"]
    assert limit_on(bench) == usual
    guest = bench.ask("alpha", lambda hypervisor: find_guest(hypervisor, "web1"))
    assert guest is not None
    assert guest.job is None
    network.shape(bench.plan, "alpha", parse_rate("400mbit"))
    again = migrate(bench, "beta", "--max-downtime", "2s")
    assert again.json["outcome"] == "completed"
    assert again.json["passes"][0]["number"] == 1
    assert bench.ledgers() == WHOLE


@pytest.mark.long
@pytest.mark.parametrize("controller", ["lives", "is killed"])
def test_a_definition_that_a_failed_move_has_left_goes(bench: Bench, controller: str) -> None:
    """As of a target's libvirtd that dies after it has stored it, and before it starts the CPUs."""
    bench.guest(**BUSY)
    network.shape(bench.plan, "alpha", SLOW)
    process = bench.start("migrate", "web1", "--to", "beta", "--mode", "precopy", *SHORT)
    first_line(process, "iteration=1")
    xml = bench.plan.shared / "web1.xml"
    xml.write_text(bench.inside("alpha", "virsh", "dumpxml", "--inactive", "web1"))
    bench.inside("beta", "virsh", "define", str(xml))
    xml.unlink()
    if controller == "lives":
        process.send_signal(signal.SIGINT)
        assert finish(process).code == 130
    else:
        process.kill()
        finish(process)
        bench.inside("alpha", "virsh", "domjobabort", "web1")
        bench.good("recover")

    assert bench.inside("beta", "virsh", "list", "--all", "--name").split() == []
    assert bench.inside("alpha", "virsh", "list", "--name").split() == ["web1"]
    assert bench.ledgers() == WHOLE


@pytest.mark.parametrize("phase", ["preflight", "setup"])
def test_an_early_ctrl_c_ends_at_once(bench: Bench, phase: str) -> None:
    """In preflight, or while the target's QEMU starts and there is no job to abort yet."""
    bench.guest(**BUSY)
    network.shape(bench.plan, "alpha", SLOW)
    process = bench.start("migrate", "web1", "--to", "beta")
    first_line(process, f"phase={phase}")
    process.send_signal(signal.SIGTERM)
    done = finish(process, limit=20)

    assert done.code == 130
    assert bench.where() == ["alpha"]


@pytest.mark.long
def test_the_time_limit_stops_a_migration_that_does_not_converge(bench: Bench) -> None:
    bench.guest(**BUSY)
    network.shape(bench.plan, "alpha", SLOW)
    done = migrate(bench, "beta", "--timeout", "14s", "--mode", "precopy", *SHORT)

    assert done.code == 20
    assert done.json["outcome"] == "timed-out"
    assert "not converging" in done.err
    assert "allow more time" in done.err
    assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


def test_a_killed_controller_ends_nothing(bench: Bench) -> None:
    bench.guest(memory="512MiB")
    network.shape(bench.plan, "alpha", parse_rate("400mbit"))
    process = bench.start("migrate", "web1", "--to", "beta")
    first_line(process, "iteration=1")
    process.kill()
    finish(process)
    until(lambda: bench.where() == ["beta"])

    assert bench.ledgers() == WHOLE


def test_when_the_source_cannot_log_in_the_client_drives(bench: Bench) -> None:
    bench.guest()
    path = bench.plan.folder / "one-way.yaml"
    path.write_text(bench.plan.inventory.read_text().replace(
        "    migration_address", "    peer_uri: qemu+tcp://127.0.0.9/system\n    migration_address"
    ))  # fmt: skip
    report = bench.good("migrate", "web1", "--to", "beta", "--json", "-i", str(path)).json

    assert (report["outcome"], report["driver"]) == ("completed", "client-driven")
    assert "cannot log in to beta's libvirtd" in report["warnings"][0]
    assert bench.ledgers() == WHOLE


@pytest.mark.parametrize(
    "form",
    [
        "qemu+ssh://root@beta/system",
        pytest.param("qemu+tls://beta/system", marks=pytest.mark.long),
    ],
)
def test_peers_talk_over_ssh_and_tls(bench: Bench, form: str) -> None:
    bench.guest()
    path = bench.plan.folder / "secure.yaml"
    path.write_text(bench.plan.inventory.read_text().replace(
        "    migration_address", f"    peer_uri: {form}\n    migration_address"
    ))  # fmt: skip
    report = bench.good("migrate", "web1", "--to", "beta", "--json", "-i", str(path)).json

    assert (report["outcome"], report["driver"]) == ("completed", "peer-to-peer")
    assert bench.where() == ["beta"]


@pytest.mark.long
def test_a_bandwidth_limit_is_kept(bench: Bench) -> None:
    bench.guest(dirty="32MiB@1MiB/s")
    report = bench.good("migrate", "web1", "--to", "beta", "--bandwidth", "20MiB/s", "--json").json
    rate = report["bytes_transferred"] / (report["total_ms"] / 1000)

    assert (10 << 20) / slowness() < rate < 22 << 20


@pytest.mark.long
def test_final_statistics_are_there_for_others_too(bench: Bench) -> None:
    bench.guest(dirty=CALM)
    report = bench.good("migrate", "web1", "--to", "beta", "--json").json
    seen = bench.inside("beta", "virsh", "domjobinfo", "web1", "--completed")

    assert report["downtime_ms"] is not None
    assert "Completed" in seen


@pytest.mark.long
def test_a_reader_that_goes_away_does_not_end_the_migration(bench: Bench) -> None:
    bench.guest()
    network.shape(bench.plan, "alpha", parse_rate("400mbit"))
    process = bench.start("migrate", "web1", "--to", "beta")
    first_line(process, "iteration=1")
    assert process.stderr is not None
    process.stderr.close()
    code_of(process)
    assert process.stdout is not None
    report = process.stdout.read()
    process.stdout.close()

    assert "completed, alpha → beta" in report
    assert bench.ledgers() == WHOLE


def test_a_target_that_dies_on_the_way_leaves_the_guest_where_it_was(bench: Bench) -> None:
    bench.guest(**BUSY)
    network.shape(bench.plan, "alpha", SLOW)
    process = bench.start("migrate", "web1", "--to", "beta", "--json", "--mode", "precopy")
    first_line(process, "iteration=1")
    bench.good("lab", "kill", "beta", "--name", bench.plan.name)
    done = finish(process)

    assert (done.code, done.json["outcome"]) == (20, "failed")
    assert "no further attempt: beta" in " ".join(done.json["warnings"])
    assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


def test_a_target_that_died_with_the_controller_is_not_waited_for(bench: Bench) -> None:
    """What it has is not all of the guest: it runs nowhere, ever."""
    bench.guest(**BUSY)
    network.shape(bench.plan, "alpha", SLOW)
    process = bench.start("migrate", "web1", "--to", "beta", "--mode", "precopy")
    first_line(process, "iteration=1")
    process.kill()
    bench.good("lab", "kill", "beta", "--name", bench.plan.name)
    finish(process)
    until(lambda: "None" in bench.inside("alpha", "virsh", "domjobinfo", "web1"), limit=90)
    shown("failures.md", "vmckpt recover --dry-run", bench.run("recover", "--dry-run").out)
    (found,) = bench.good("recover", "--json").json

    assert found["outcome"] == "failed"
    assert "never received all of the guest's memory" in found["truth"]
    assert bench.good("jobs", "--json").json == []
    assert bench.where() == ["alpha"]
    assert bench.ledgers() == WHOLE


@pytest.mark.campaign
@pytest.mark.long
def test_moves_over_slow_and_fast_links_by_all_kinds_of_guests(bench: Bench) -> None:
    """Long pre-copies, two CPUs, shared memory, qcow2: each move leaves all ledgers whole."""
    kinds: list[dict[str, Any]] = [
        {"dirty": "64MiB@20MiB/s"},
        {"dirty": "32MiB@1MiB/s", "memory": "512MiB", "disk_format": "qcow2"},
        {"dirty": "64MiB@10MiB/s", "vcpus": 2, "shared_memory": True},
    ]
    for kind in kinds:
        bench.guest(**kind)
        for turn in range(4):
            to = ("beta", "alpha")[turn % 2]
            rate = (None, "400mbit", "200mbit", None)[turn % 4]
            for host in ("alpha", "beta"):
                network.shape(bench.plan, host, parse_rate(rate) if rate else None)
            done = migrate(bench, to, "--max-downtime", "1s", "--timeout", "2m")
            assert (done.code, kind, rate) == (0, kind, rate), done.err
            assert bench.ledgers() == WHOLE, (kind, rate)
        bench.good("lab", "remove", "web1", "--name", bench.plan.name)


def test_the_report_of_a_copied_disk_counts_the_disk_as_its_forecast_does(bench: Bench) -> None:
    bench.guest(dirty=CALM, private_disk=True)
    done = migrate(bench, "beta", "--copy-storage", "full", "--mode", "precopy")

    assert done.code == 0, done.err
    sent, stats = done.json["forecast"]["score"]["sent"], ("--completed", "--rawstats")
    told = bench.inside("beta", "virsh", "domjobinfo", "web1", *stats)
    (memory,) = [int(line.split()[1]) for line in told.splitlines() if "memory_processed" in line]
    assert sent["measured"] == done.json["bytes_transferred"] > memory
    assert sent["covered"]
