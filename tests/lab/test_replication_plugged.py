"""Network cards that are plugged into a protected guest, and out of it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.bench import WHOLE, Bench, until
from tests.lab.protecting import (
    GUEST,
    SOON,
    asked,
    epochs,
    lab_with_witness,
    left,
    on_qemu,
    protect,
    tidied,
)
from vmckpt_lab import guest_image
from vmckpt_lab.faults import inject
from vmckpt_lab.guest_image import Image
from vmckpt_lab.plan import GUEST_BRIDGE
from vmckpt_lab.shell import run

pytestmark = pytest.mark.long

CARD = (
    f"<interface type='bridge'><mac address='52:54:00:aa:00:01'/><source bridge='{GUEST_BRIDGE}'/>"
)
CARD += "<model type='virtio'/><driver name='qemu'/></interface>"
SENDS = """#!/bin/busybox sh
while ! ip link set eth1 up 2>/dev/null; do usleep 2000; done
ip addr add 192.0.2.7/24 dev eth1
while :; do ping -c 1 -W 1 192.0.2.1; done >/dev/null 2>&1
"""
"""In the guest: it uses a second card as soon as its kernel has it."""


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"g{os.getpid()}") as made:
        yield made


@pytest.fixture
def pair(witnessed: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Its guests use a second card by themselves."""
    folder = witnessed.plan.shared / "sends"  # a host sees no /tmp but its own
    made = sending(folder)
    monkeypatch.setattr(guest_image, "prepare", lambda: made)
    with tidied(witnessed) as bench:
        yield bench
    shutil.rmtree(folder)


def sending(folder: Path) -> Image:
    """The guest's image; files of a later archive replace those of one before."""
    usual, root = guest_image.prepare(), folder / "root"
    root.mkdir(parents=True)
    init = (Path(guest_image.__file__).parent / "assets/init").read_text()
    (root / "init").write_text(init.replace("\n/prover\n", "\n/sends &\n/prover\n"))
    (root / "sends").write_text(SENDS)
    for name in ("init", "sends"):
        (root / name).chmod(0o755)
    guest_image._pack(root, folder / "more.cpio")
    both = folder / "initramfs.cpio"
    both.write_bytes(usual.initramfs.read_bytes() + (folder / "more.cpio").read_bytes())
    run(["chmod", "-R", "a+rX", str(folder)])
    return replace(usual, initramfs=both)


def plug(bench: Bench, how: str = "attach-device") -> None:
    file = bench.plan.shared / "sends/card.xml"
    file.write_text(CARD)
    bench.inside("alpha", "virsh", "-q", how, "web1", str(file), "--live")


def sent(bench: Bench) -> int:
    """Packets that came out of the second card: seen at its tap."""
    (_, tap) = cards(bench)
    (told,) = json.loads(bench.inside("alpha", "ip", "-s", "-j", "link", "show", tap))
    return int(told["stats64"]["rx"]["packets"])


def cards(bench: Bench) -> list[str]:
    lines = bench.inside("alpha", "virsh", "-q", "domiflist", "web1").splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def test_a_card_that_is_plugged_in_sends_nothing_until_the_standby_is_invalid(
    pair: Bench,
) -> None:
    pair.guest(**GUEST, boot=True)
    protect(pair, "--ttl", "40s")  # to stop a database takes seconds on a busy machine
    epochs(pair)
    agent = asked(pair)["process"]
    command = inject.stop_postgres(pair.plan)
    try:  # while the lease store is away, nothing can be recorded there
        plug(pair)
        over = time.monotonic() + 4.0
        while time.monotonic() < over:
            assert sent(pair) == 0
    finally:
        inject.start_postgres(pair.plan, command)
    until(lambda: asked(pair).get("phase") == "alone", limit=SOON)
    until(lambda: sent(pair) > 0, limit=SOON)
    assert "plugged or unplugged" in asked(pair)["says"]
    assert asked(pair)["process"] == agent
    pair.good("unprotect", "web1")
    assert left(pair) == []
    assert on_qemu(pair, "alpha") == []
    assert pair.ledgers() == WHOLE


def unplugged(pair: Bench) -> bool:
    """Whether its agent knows, or its standby runs; else it is asked for. QEMU may be gone."""
    if pair.where() == ["beta"] or asked(pair).get("phase") == "alone":
        return True
    try:
        plug(pair, "detach-device")
    except subprocess.CalledProcessError as exc:
        sys.stderr.write(f"virsh detach-device: {exc.stderr}\n")
    return False


def test_a_card_that_is_unplugged_ends_the_protection_and_nobody_misses_anything(
    pair: Bench,
) -> None:
    """QEMU may crash: packets that wait refer to the card. Then the standby takes over."""
    pair.guest(**GUEST, boot=True)
    plug(pair)
    until(lambda: sent(pair) > 0, limit=SOON)  # an unprotected guest's card sends at once
    protect(pair)
    epochs(pair)
    agent = asked(pair)["process"]
    until(lambda: unplugged(pair), limit=SOON)
    crashed = pair.where() == ["beta"]
    sys.stderr.write(f"QEMU {'crashed' if crashed else 'runs'}\n")
    heard = pair.seen().heard
    until(lambda: pair.seen().heard > heard + 5, limit=SOON)
    if not crashed:
        assert "plugged or unplugged" in asked(pair)["says"]
        # The watchdog restarts an agent that was given no core for a second of a pause.
        log = pair.inside("alpha", "sh", "-c", "cat /run/vmckpt/replication/*/guard.log")
        assert asked(pair)["process"] == agent or f"killed the agent, process {agent}" in log
        pair.good("unprotect", "web1")
        assert on_qemu(pair, "alpha") == []
        protect(pair)
        epochs(pair)
        pair.good("failover", "web1", "--planned")
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE
