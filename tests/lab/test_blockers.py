"""What keeps a guest from moving, and what bad input gets, on real hosts."""

import signal
from pathlib import Path

import pytest

from tests.lab.bench import BUSY, SLOW, Bench, codes, finish, first_line, migrate
from vmckpt_lab import network


def test_a_dry_run_changes_nothing(bench: Bench) -> None:
    bench.guest()
    done = migrate(bench, "beta", "--dry-run")

    assert (done.code, done.json["outcome"]) == (0, "planned")
    assert bench.where() == ["alpha"]
    assert list(bench.plan.shared.glob(".vmckpt*")) == []
    assert "can move from alpha to beta" in bench.good(
        "migrate", "web1", "--to", "beta", "--dry-run").out  # fmt: skip


def test_a_private_disk_is_seen_not_to_be_the_same(bench: Bench) -> None:
    bench.guest(private_disk=True)
    twin = bench.plan.host("beta").root / "private/web1.raw"
    twin.write_bytes(b"\0" * (64 << 20))
    done = migrate(bench)
    twin.unlink()

    assert (done.code, codes(done)) == (21, ["storage-not-visible"]), done.err
    assert "Traceback" not in done.err


def test_a_link_to_a_private_disk_is_not_taken_for_shared_storage(bench: Bench) -> None:
    guest = bench.guest(private_disk=True)
    bench.inside("alpha", "virsh", "-q", "destroy", "web1")
    link = bench.plan.shared / "web1.raw"
    link.symlink_to(guest.disk_path)
    xml = bench.inside("alpha", "virsh", "dumpxml", "--inactive", "web1")
    path = bench.plan.shared / "web1.xml"
    path.write_text(xml.replace(guest.disk_path, str(link)))
    bench.inside("alpha", "virsh", "-q", "define", str(path))
    path.unlink()
    bench.inside("alpha", "virsh", "-q", "start", "web1")
    twin = bench.plan.host("beta").root / "private/web1.raw"
    twin.write_bytes(b"\0" * (64 << 20))
    done = migrate(bench)

    assert (done.code, codes(done)) == (21, ["storage-not-visible"]), done.err


def test_a_changed_host_key_of_the_target_stops_the_migration(bench: Bench) -> None:
    bench.guest()
    known = bench.plan.folder / "other_known_hosts"
    alpha, beta = (bench.plan.folder / "ssh/known_hosts").read_text().splitlines()
    swapped = [
        f"{a.split()[0]} {' '.join(b.split()[1:])}" for a, b in ((alpha, alpha), (beta, alpha))
    ]
    known.write_text("@cert-authority * ssh-ed25519 AAAA\n" + "\n".join(swapped) + "\n")
    path = bench.plan.folder / "impostor.yaml"
    path.write_text(bench.plan.inventory.read_text().replace(
        str(bench.plan.folder / "ssh/known_hosts"), str(known)
    ))  # fmt: skip
    done = bench.run("migrate", "web1", "--to", "beta", "-i", str(path))

    assert (done.code, "has changed" in done.err) == (14, True)
    assert bench.where() == ["alpha"]


def test_all_blockers_come_at_once(bench: Bench) -> None:
    bench.guest(private_disk=True)
    other = bench.inside("alpha", "virsh", "dumpxml", "web1")
    bench.inside("beta", "sh", "-c", "ip link set guests name elsewhere")
    uuid = other.split("<uuid>")[1].split("</uuid>")[0]
    xml = f"<domain type='qemu'><name>web9</name><uuid>{uuid}</uuid><memory>65536</memory>" \
          "<os><type>hvm</type></os></domain>"  # fmt: skip
    path = Path(bench.plan.shared, "web9.xml")
    path.write_text(xml)
    bench.inside("beta", "virsh", "-q", "define", str(path))
    path.unlink()
    bench.inside("alpha", "virsh", "-q", "suspend", "web1")
    try:
        done = migrate(bench)
    finally:
        bench.inside("beta", "sh", "-c", "ip link set elsewhere name guests")
        bench.inside("beta", "virsh", "-q", "undefine", "web9")

    assert done.code == 21
    assert set(codes(done)) == {
        "guest-not-running", "storage-not-visible", "network-missing", "uuid-taken",
    }  # fmt: skip
    assert "4 reasons" in done.err
    assert bench.where() == ["alpha"]


@pytest.mark.long
def test_a_name_taken_on_the_target_is_a_blocker(bench: Bench) -> None:
    bench.guest("web2", "beta")
    bench.guest("web1", "alpha")
    bench.inside("beta", "virsh", "-q", "destroy", "web2")
    bench.inside("beta", "virsh", "-q", "domrename", "web2", "web1")
    done = migrate(bench, "beta")

    assert (done.code, codes(done)) == (21, ["name-taken"])


def test_a_guest_with_a_job_is_left_alone(bench: Bench) -> None:
    bench.guest(**BUSY)
    network.shape(bench.plan, "alpha", SLOW)
    first = bench.start("migrate", "web1", "--to", "beta", "--policy", "never-postcopy")
    first_line(first, "iteration=1")
    second = migrate(bench)
    first.send_signal(signal.SIGINT)
    ended = finish(first)

    assert (second.code, codes(second)) == (21, ["job-in-progress"])
    assert ended.code == 130


def test_a_target_that_is_off_is_a_blocker(bench: Bench) -> None:
    bench.guest()
    bench.good("lab", "kill", "beta", "--name", bench.plan.name)
    done = migrate(bench)

    assert (done.code, codes(done)) == (21, ["host-down"])


BAD_INPUT: list[tuple[tuple[str, ...], int, str]] = [
    (("migrate", "web1", "--to", "alpha"), 21, "already on alpha"),
    (("migrate", "wbe1", "--to", "beta"), 2, "did you mean web1?"),
    (("migrate", "web1", "--to", "bta"), 3, "did you mean 'beta'?"),
    (("migrate", "web1", "--to", "beta", "--from", "beta"), 21, "no guest 'web1' on this host"),
    (("migrate", "web1"), 2, "Missing option '--to'"),
    (("migrate", "web1", "--to", "beta", "--timeout", "5"), 2, "use a value like 300ms"),
    (("migrate", "web1", "--to", "beta", "--timeout", "0s"), 2, "must be greater than 0"),
    (("migrate", "web1", "--to", "beta", "--bandwidth", "5"), 2, "use a value like 200MiB/s"),
    (("migrate", "web1", "--to", "beta", "--bandwidth", "1K/s"), 2, "the minimum is 1MiB/s"),
    (("migrate", "a;reboot", "--to", "beta"), 2, "no guest 'a;reboot'"),
    (("migrate", "web1", "--to", "beta", "--inventory", "/nowhere"), 3, "No such file"),
    (("migrate", "web1", "--to", "beta", "--frm", "x"), 2, "No such option"),
    (("doctor", "gama"), 3, "no host 'gama'"),
    (("nonsense",), 2, "No such command"),
]


@pytest.mark.long
def test_bad_input_gets_one_line_and_its_exit_code(bench: Bench) -> None:
    bench.guest(dirty="8MiB@1MiB/s")
    for args, code, complaint in BAD_INPUT:
        done = bench.run(*args)

        assert done.code == code, args
        assert complaint in done.err + done.out
        assert "Traceback" not in done.err
        assert sum(line.startswith("error: ") for line in done.err.splitlines()) == 1
