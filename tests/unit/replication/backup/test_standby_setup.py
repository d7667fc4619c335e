"""Images that were there before a standby: which may be its, and that they stay when it goes."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.replicas import session
from vmckpt.agent.orders import ReplicaOrder
from vmckpt.agent.replication import orders
from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import standby_domain as libvirt_side
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.replication.backup import standby_setup
from vmckpt.replication.backup.standby_setup import Image, inspect_image, why_not
from vmckpt.replication.session import Disk, Session
from vmckpt.units import MIB, Bytes
from vmckpt.util import host_directories

XML = """<domain type='kvm'><name>web1</name><devices><disk type='file' device='disk'>
<driver name='qemu' type='qcow2'/><source file='/srv/web1.qcow2'/><target dev='vda' bus='virtio'/>
</disk></devices></domain>"""
FINE = Image(path="/srv/a.qcow2", size=Bytes(MIB))


def image(path: Path, *, size: int = MIB, format_: str = "qcow2") -> Path:
    command = ["qemu-img", "create", "-q", "-f", format_, str(path), str(size)]
    subprocess.run(command, check=True)
    return path


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (FINE, None),
        (replace(FINE, there=False, size=None), "does not exist"),
        (replace(FINE, regular=False, size=None), "is not a regular file"),
        (replace(FINE, size=Bytes(MIB + 512)), "has 1049088 bytes, but the disk has 1048576"),
        (replace(FINE, user="db1"), "is used by guest db1"),
        (replace(FINE, size=None, says="Failed to get shared lock"), "is open in another process"),
        (replace(FINE, size=None, says="Image is not in qcow2 format"), "cannot be read: Image is"),
    ],
)
def test_each_reason_against_an_image_is_told(found: Image, why: str | None) -> None:
    told = why_not(found, MIB)
    assert (told is None) if why is None else (told is not None and why in told)


def test_what_is_there_is_seen(tmp_path: Path) -> None:
    made = image(tmp_path / "a.qcow2")
    raw = image(tmp_path / "b.raw", format_="raw")
    assert inspect_image(str(made), "qcow2") == Image(path=str(made), size=Bytes(MIB))
    assert inspect_image(str(raw), "raw") == Image(path=str(raw), size=Bytes(MIB))
    assert "not in qcow2 format" in inspect_image(str(raw), "qcow2").says
    assert inspect_image(str(tmp_path / "none"), "raw") == Image(
        path=f"{tmp_path}/none", there=False
    )
    assert inspect_image(str(tmp_path), "raw") == Image(path=str(tmp_path), regular=False)
    assert inspect_image(str(made), "made up").size is None


def test_an_image_that_is_marked_as_damaged_is_none(tmp_path: Path) -> None:
    made = image(tmp_path / "a.qcow2")
    with made.open("r+b") as out:
        out.seek(79)  # the last byte of its incompatible features
        out.write(b"\x02")
    assert inspect_image(str(made), "qcow2").says == "it is marked as corrupt"


def test_one_that_a_program_writes_to_is_open(tmp_path: Path) -> None:
    made = image(tmp_path / "a.qcow2")
    socket = tmp_path / "s"
    words = ["qemu-nbd", "-f", "qcow2", "--persistent", "-k", str(socket), str(made)]
    with subprocess.Popen(words) as server:
        try:
            while not socket.exists():
                assert server.poll() is None
            assert (
                why_not(inspect_image(str(made), "qcow2"), MIB)
                == f"{made} is open in another process"
            )
        finally:
            server.kill()


class Libvirt:
    """Starts standbys, or does not."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.fails = False

    def create_paused(self, xml: str, **_: object) -> None:
        if self.fails:
            raise HypervisorError("no memory", host="alpha")
        self.started.append(xml)


@pytest.fixture
def libvirt(monkeypatch: pytest.MonkeyPatch) -> Libvirt:
    made = Libvirt()
    monkeypatch.setattr(libvirt_side, "create_paused", made.create_paused)
    monkeypatch.setattr(standby_setup, "waits", lambda _: False)
    monkeypatch.setattr(standby_setup, "_runs_here", lambda _: False)
    return made


def lies_on(*disks: Disk) -> Session:
    return session(role="backup", host="alpha", peer="beta", disks=disks)


def taken(path: Path, *, size: int = MIB, target: str = "vda") -> Disk:
    return Disk(target=target, size=size, path=str(path), format="qcow2", taken=True)


def test_a_standby_on_an_image_that_was_there_leaves_it(libvirt: Libvirt, tmp_path: Path) -> None:
    made = image(tmp_path / "a.qcow2")
    new = tmp_path / "b.qcow2"
    before = made.read_bytes()
    told = lies_on(taken(made), Disk(target="vdb", size=MIB, path=str(new), format="qcow2"))
    standby_setup.make(told, XML)
    assert str(made) in libvirt.started[0]
    assert new.exists()
    did = standby_setup.remove(told, tmp_path / "folder")
    assert did == (f"kept {made}, which existed before", f"removed {new}")
    assert made.read_bytes() == before
    assert list(tmp_path.iterdir()) == [made]


def test_a_standby_that_cannot_be_made_leaves_it_too(libvirt: Libvirt, tmp_path: Path) -> None:
    made = image(tmp_path / "a.qcow2")
    new = tmp_path / "b.qcow2"
    libvirt.fails = True
    told = lies_on(taken(made), Disk(target="vdb", size=MIB, path=str(new), format="qcow2"))
    with pytest.raises(HypervisorError, match="no memory"):
        standby_setup.make(told, XML)
    assert list(tmp_path.iterdir()) == [made]


def test_an_image_that_became_another_meanwhile_is_not_written_to(
    libvirt: Libvirt, tmp_path: Path
) -> None:
    made = image(tmp_path / "a.qcow2", size=2 * MIB)
    new = Disk(target="vdb", size=MIB, path=str(tmp_path / "b.qcow2"), format="qcow2")
    with pytest.raises(BadInput, match=r"alpha: .* has 2097152 bytes.* used for vda"):
        standby_setup.make(lies_on(new, taken(made)), XML)
    assert libvirt.started == []
    assert list(tmp_path.iterdir()) == [made]


def test_a_session_tells_a_new_agent_what_was_taken(tmp_path: Path) -> None:
    told = lies_on(taken(tmp_path / "a"), taken(tmp_path / "b", target="vdb"))
    told.write(tmp_path / "folder")
    assert Session.read(tmp_path / "folder") == told


def order(what: str, **more: object) -> ReplicaOrder:
    guest = session().guest
    return ReplicaOrder(what=what, guest=guest, uri="none:///", host="alpha", **more)  # type: ignore[arg-type]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where agents have their folders, as long as the test lasts."""
    monkeypatch.setattr(host_directories, "RUN", tmp_path / "run")
    monkeypatch.setattr(host_directories, "SHM", tmp_path)
    return host_directories.run_dir("replication")


def test_the_host_says_what_it_has_of_the_guest(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = image(elsewhere / "a.qcow2"), elsewhere / "b.qcow2"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(made), "-F", "qcow2"]
    subprocess.run([*command, str(other)], check=True)
    asked = order(
        "before", images={"vda": (str(made), "qcow2"), "vdb": (str(elsewhere / "x"), "raw")},
        users={str(other): ("db1", "qcow2")},
    )  # fmt: skip
    told = orders.carry_out(asked, None)  # type: ignore[arg-type]
    assert told["runs"] is False
    found = {name: Image(**one) for name, one in told["images"].items()}
    # db1's image lies on it.
    assert (found["vda"].user, found["vda"].size) == ("db1", MIB)
    assert found["vdb"].there is False
    monkeypatch.setattr(identity, "runs", lambda _: True)
    told = orders.carry_out(asked, None)  # type: ignore[arg-type]
    assert told["runs"] is True


def test_a_definition_that_a_host_kept_over_its_restart_goes_when_the_guest_is_elsewhere(
    elsewhere: Path,
) -> None:
    state = elsewhere / "replica-1"
    state.mkdir()
    (state / "definition.json").write_text("{}")
    told = order("end", define=False, state=str(state), owner="5e55")
    assert orders.carry_out(told, None) == {"did": []}  # type: ignore[arg-type]
    assert not state.exists()
    assert orders.carry_out(told, None) == {"did": []}  # type: ignore[arg-type]
