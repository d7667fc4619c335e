"""A fork beside its running original: MAC addresses of its own, and the base image of both."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.lab import guest_agents
from tests.lab.bench import Bench, until
from tests.lab.snapshots import SMALL, proofs, taken

MAC = re.compile(r"52:54:00[:0-9a-f]+")


def defined(bench: Bench, name: str) -> str:
    (mac,) = MAC.findall(bench.inside("alpha", "virsh", "domiflist", name))
    return str(mac)


def reported(bench: Bench, name: str) -> str:
    """The address that QEMU has, and the guest with it."""
    command = '{"execute": "query-rx-filter"}'
    told = bench.inside("alpha", "virsh", "qemu-monitor-command", name, command)
    (card,) = json.loads(told)["return"]
    return str(card["main-mac"])


def link(bench: Bench, name: str) -> str:
    mac = defined(bench, name)
    return bench.inside("alpha", "virsh", "domif-getlink", name, mac).split()[-1]


def removed(bench: Bench, name: str) -> None:
    for words in (("destroy", name), ("undefine", name)):
        bench.inside("alpha", "virsh", *words)
    for path in Path(bench.plan.shared).glob(f"{name}-*"):
        path.unlink()


@pytest.mark.long
def test_a_fork_beside_its_original_has_a_mac_of_its_own_and_then_a_link(
    kept: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest_agents.started(kept, tmp_path, monkeypatch, stays=True)
    until(lambda: "hardware-address" in kept.inside(
        "alpha", "virsh", "qemu-agent-command", "web1",
        '{"execute": "guest-network-get-interfaces"}',
    ), limit=60)  # fmt: skip
    one = taken(kept).json
    for words, state in ((("--link",), "up"), ((), "down")):
        done = kept.good("snapshot", "restore", one["id"], "--as", "fork", *words, "--json")
        try:
            assert done.json["links_down"] == ""
            original, own = reported(kept, "web1"), reported(kept, "fork")
            assert own == defined(kept, "fork")
            assert own not in (original, defined(kept, "web1"))
            assert link(kept, "fork") == state
            assert link(kept, "web1") == "up"
            stored = kept.inside("alpha", "virsh", "dumpxml", "fork", "--inactive")
            assert ("<link state='down'/>" in stored) == (state == "down")
            assert any("has the IP addresses of its original" in one
                       for one in done.json["warnings"]), done.json  # fmt: skip
        finally:
            removed(kept, "fork")


@pytest.mark.long
def test_without_an_agent_a_forks_link_stays_down_until_it_was_restarted(
    kept: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.guest(**SMALL)
    none = taken(kept).json
    fork = ("--as", "fork", "--link", "--json")
    refused = kept.run("snapshot", "restore", none["id"], *fork)
    assert refused.code == 2, refused.err
    assert "--link is refused" in refused.err
    assert "no guest agent" in refused.err
    assert not list(Path(kept.plan.shared).glob("fork-*"))

    done = kept.good("snapshot", "restore", none["id"], "--as", "fork", "--json")
    try:
        (said,) = [one for one in done.json["warnings"] if "MAC" in one]
        assert reported(kept, "fork") == reported(kept, "web1")
        assert link(kept, "fork") == "down"
        # What the message says is what helps.
        commands = re.findall(r"virsh [^;]*", said)
        assert [one.split()[1] for one in commands] == ["destroy", "start", "domif-setlink"]
        for command in commands:
            kept.inside("alpha", *command.split())
        assert reported(kept, "fork") == defined(kept, "fork") != reported(kept, "web1")
        assert link(kept, "fork") == "up"
    finally:
        removed(kept, "fork")


@pytest.mark.long
def test_an_agent_that_does_not_answer_leaves_the_link_down(kept: Bench) -> None:
    kept.guest(**SMALL)
    kept.inside("alpha", "virsh", "destroy", "web1")
    xml = kept.inside("alpha", "virsh", "dumpxml", "web1", "--inactive")
    file = Path(kept.plan.shared) / "agent.xml"
    file.write_text(xml.replace("</devices>", guest_agents.CHANNEL))
    kept.inside("alpha", "virsh", "define", str(file))
    file.unlink()
    heard = kept.seen().heard
    kept.inside("alpha", "virsh", "start", "web1")
    until(lambda: kept.seen().heard > heard + 5, limit=60)
    one = taken(kept).json
    try:
        done = kept.run("snapshot", "restore", one["id"], "--as", "fork", "--link", "--json")
        assert done.code == 24, done.err
        assert "its guest agent does not answer; their links stay down" in done.err
        assert "does not answer" in done.json["links_down"]
        assert link(kept, "fork") == "down"
        assert "running" in kept.inside("alpha", "virsh", "domstate", "fork")
    finally:
        removed(kept, "fork")


def backing(path: Path) -> str | None:
    words = ["qemu-img", "info", "-U", "--output=json", str(path)]
    told = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    found: str | None = told.get("backing-filename")
    return found


def overlaid(bench: Bench) -> Path:
    """Start web1, and let its disk be an overlay of what it was."""
    disk = Path(bench.guest(**SMALL, disk_format="qcow2").disk_path)
    base = disk.with_name("base.qcow2")
    bench.inside("alpha", "virsh", "destroy", "web1")
    disk.rename(base)
    words = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(base), str(disk)]
    bench.inside("alpha", *words)
    heard = bench.seen().heard
    bench.inside("alpha", "virsh", "start", "web1")
    until(lambda: bench.seen().heard > heard + 5, limit=60)
    return disk


@pytest.mark.long
def test_forks_and_restores_of_an_overlay_are_overlays_of_the_same_base(kept: Bench) -> None:
    disk = overlaid(kept)
    base = disk.with_name("base.qcow2")
    one = taken(kept).json
    fork = disk.with_name("fork-vda.qcow2")
    done = kept.good("snapshot", "restore", one["id"], "--as", "fork", "--json")
    try:
        assert done.json["bases"] == {"vda": str(base)}, done.json["warnings"]
        assert backing(fork) == str(base)
        assert fork.stat().st_blocks <= disk.stat().st_blocks * 1.2 + 2048
    finally:
        removed(kept, "fork")
    back = kept.good("snapshot", "restore", one["id"], "--replace", "--json")
    assert back.json["bases"] == {"vda": str(base)}
    assert backing(disk) == str(base)
    assert not any("differed" in text for text in back.json["warnings"]), back.json
    assert proofs(kept) == []


@pytest.mark.long
def test_a_base_that_a_guest_writes_is_not_used(kept: Bench) -> None:
    """Of a guest that is off, the image itself tells of its base."""
    disk = overlaid(kept)
    base, fork = disk.with_name("base.qcow2"), disk.with_name("fork-vda.qcow2")
    kept.inside("alpha", "virsh", "destroy", "web1")
    off = taken(kept, "--no-memory").json
    xml = kept.inside("alpha", "virsh", "dumpxml", "web1", "--inactive")
    other = re.sub(r"<(name|uuid)>[^<]*</\1>|<mac [^>]*>", "", xml)
    other = other.replace("<memory", "<name>other</name><memory", 1)
    file = disk.with_name("other.xml")
    file.write_text(other.replace(str(disk), str(base)))
    try:
        again = kept.good("snapshot", "restore", off["id"], "--as", "fork", "--json")
        assert again.json["bases"] == {"vda": str(base)}
        fork.unlink()
        kept.inside("alpha", "virsh", "undefine", "fork")
        kept.inside("alpha", "virsh", "define", str(file))
        flat = kept.good("snapshot", "restore", off["id"], "--as", "fork", "--json")
        assert flat.json["bases"] == {}
        assert any(
            f"disk vda was an overlay of {base}, and is now a complete image" in text
            and "guest other on alpha uses" in text
            for text in flat.json["warnings"]
        ), flat.json["warnings"]
        assert backing(fork) is None
    finally:
        file.unlink()
        kept.inside("alpha", "virsh", "undefine", "other")
        kept.inside("alpha", "virsh", "undefine", "fork")
        fork.unlink(missing_ok=True)
