"""QEMU as a user of its own, as libvirt comes: it makes files and sockets only where it may."""

import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import protecting
from tests.lab.bench import WHOLE, Bench, until
from tests.lab.moving import pki, verdict
from tests.lab.protecting import SOON, asked, epochs, imitation, left, processes, protect, tidied
from tests.lab.snapshots import left as left_of_snapshots
from tests.lab.snapshots import proofs, taken
from vmckpt_lab import host

USER = "libvirt-qemu"
PRIVATE: dict[str, Any] = {"memory": "160MiB", "dirty": "16MiB@4MiB/s", "disk": "32MiB"}
SHARED: dict[str, Any] = {**PRIVATE, "shared_memory": True, "disk_format": "qcow2"}


@pytest.fixture(scope="module")
def confined() -> Iterator[Bench]:
    with protecting.lab_with_witness(f"u{os.getpid()}", qemu_user=USER) as bench:
        bench.good("snapshot", "init")
        yield bench


@pytest.fixture
def pair(confined: Bench) -> Iterator[Bench]:
    with tidied(confined):
        yield confined


def users(bench: Bench, name: str) -> set[str]:
    """As whom a host's guests run."""
    qemus = processes(bench, name, b"qemu-system")
    return {pwd.getpwuid(Path(f"/proc/{one}").stat().st_uid).pw_name for one in qemus}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param(PRIVATE, [], id="private"),
        pytest.param(SHARED, ["--lazy"], id="shared", marks=pytest.mark.long),
    ],
)
def test_a_snapshot_is_taken_and_comes_back(
    pair: Bench, kind: dict[str, Any], more: list[str]
) -> None:
    pair.guest(**kind)
    one = taken(pair).json
    assert users(pair, "alpha") == {USER}
    assert pair.ledgers() == WHOLE
    pair.good("snapshot", "verify", one["id"])
    pair.good("snapshot", "restore", one["id"], "--replace", *more)
    assert proofs(pair) == []
    assert users(pair, "alpha") == {USER}
    again = taken(pair).json
    assert again["same_bytes"] > 0
    assert left_of_snapshots(pair) == []


def test_a_host_that_dies_is_followed_by_its_standby(pair: Bench) -> None:
    pair.guest(**SHARED)
    protect(pair)
    assert users(pair, "beta") == {USER}
    pair.good("failover", "web1", "--test")
    pair.good("failover", "web1", "--end-test")
    until(lambda: bool(asked(pair, "beta").get("ready")), limit=SOON)
    epochs(pair)
    heard = pair.seen().heard
    until(lambda: pair.seen().heard > heard + 10, limit=SOON)
    host.power_off(pair.plan.host("alpha"))
    until(lambda: pair.where() == ["beta"], limit=SOON)
    assert users(pair, "beta") == {USER}
    assert pair.ledgers() == WHOLE


@pytest.mark.long
def test_it_is_protected_the_other_way_round_and_let_go(pair: Bench) -> None:
    pair.guest(**SHARED, private_disk=True)
    protect(pair)
    told = pair.good("failover", "web1", "--planned", "--json").json
    assert told["runs_on"] == "beta"
    assert pair.ledgers() == WHOLE
    assert left(pair) == []
    pair.good("migrate", "web1", "--to", "alpha", "--copy-storage", "thin")
    assert users(pair, "alpha") == {USER}
    taken(pair)
    assert pair.ledgers() == WHOLE


# What nobody, the user, leaves on a host: where earlier versions or this one might work, links to
# what is root's, FIFOs, and directories of its own.
_PLANTED = """
set -eu
mkdir -m 700 /root/bait
cd "$1"
for name in .web1.qcow2.vmckpt-standby .web1.qcow2.vmckpt-test-old .web1.qcow2.vmckpt-test-new; do
    echo "root's $name" >"/root/bait/$name"
    [ "$2" = with-links ] && ln -s "/root/bait/$name" "$name" || mkfifo "$name"
done
ln -s /root/bait /dev/shm/vmckpt
ln -s /root/bait /tmp/vmckpt
mkdir -m 777 /dev/shm/vmckpt-replica
mkfifo /dev/shm/vmckpt-memory /tmp/vmckpt-agent
chown -h nobody . .web1* /dev/shm/vmckpt /dev/shm/vmckpt-replica /dev/shm/vmckpt-memory
chown -h nobody /tmp/vmckpt /tmp/vmckpt-agent
"""


def bait(bench: Bench) -> list[str]:
    """All that is known of root's files to which links lead."""
    look = "cd /root/bait; stat -c '%n %a %u %g %s %i %y' . .web1*; cat .web1*"
    return [bench.inside(one.name, "sh", "-c", look) for one in bench.plan.hosts]


@pytest.mark.long
def test_whole_commands_go_on_among_what_a_local_user_planted(pair: Bench) -> None:
    guest = pair.guest(**SHARED, private_disk=True)
    for name, how in (("alpha", "with-links"), ("beta", "with-fifos")):
        pair.inside(name, "sh", "-c", _PLANTED, "sh", str(pair.plan.private), how)
    uuid = pair.inside("alpha", "virsh", "domuuid", "web1").strip()
    before = bait(pair)
    with imitation(pair, "alpha", uuid), imitation(pair, "beta", uuid):
        one = taken(pair).json
        pair.good("snapshot", "restore", one["id"], "--replace")
        protect(pair)
        pair.good("failover", "web1", "--test")
        pair.good("failover", "web1", "--end-test")
        assert pair.good("failover", "web1", "--planned", "--json").json["runs_on"] == "beta"
        assert bait(pair) == before
        # Now the other way, without an agent, among FIFOs and links once more.
        pair.good("migrate", "web1", "--to", "alpha", "--copy-storage", "thin")
        assert users(pair, "alpha") == {USER}
    assert bait(pair) == before
    assert Path(guest.disk_path).name in pair.inside("alpha", "ls", str(pair.plan.private))
    assert proofs(pair) == []
    assert left(pair) == []


def test_a_key_that_qemu_may_not_read_is_found_before_the_start(pair: Bench) -> None:
    pair.guest(**PRIVATE)
    assert verdict(pair).findings == ()
    keys = {"alpha": "client-key.pem", "beta": "server-key.pem"}
    for name, key in keys.items():
        shutil.chown(pki(pair, name) / key, "root")
        try:
            (found,) = verdict(pair).findings
        finally:
            shutil.chown(pki(pair, name) / key, USER)
        assert (found.code, found.where) == ("tls-unreadable", name)
        assert f"chown {USER} /etc/pki/qemu/{key}" in (found.hint or "")


@pytest.mark.long
def test_an_image_that_went_back_to_root_is_told_before_it_would_be_opened_again(
    pair: Bench,
) -> None:
    # libvirt does not know that the lab's folder is shared: the host that the guest leaves gives
    # its image back.
    disk = pair.guest(**SHARED).disk_path
    pair.good("migrate", "web1", "--to", "beta")
    assert Path(disk).owner() == "root"
    assert taken(pair).json["way"] == "tracking"  # QEMU keeps its images open
    for words in (
        ("snapshot", "create", "web1", "--way", "libvirt"),
        ("protect", "web1", "--to", "alpha", "--failover", "manual"),
    ):
        refused = pair.run(*words)
        assert (refused.code, f"chown {pwd.getpwnam(USER).pw_uid} {disk}" in refused.err) == (
            51,
            True,
        )
    assert pair.ledgers() == WHOLE
    shutil.chown(disk, USER)
    taken(pair)
    assert pair.ledgers() == WHOLE
