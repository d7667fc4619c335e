"""Which process is a guest's QEMU: as libvirt recorded it, whatever other processes claim."""

import errno
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt.errors import CannotCapture, QemuUnclear
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.identity import ProcessFacts, Recorded

GUEST = str(uuid.uuid4())
"""Another one in each run: processes of this test are seen by all that run on this machine."""
STATUS = """<domstatus state='running' reason='booted' pid='{pid}'>
  <monitor path='{monitor}' type='unix'/>
  <domain type='kvm' id='3'>
    <name>web1</name>
    <uuid>{guest}</uuid>
    <devices><emulator>{emulator}</emulator></devices>
    <seclabel type='dynamic' model='apparmor' relabel='yes'><label>x</label></seclabel>
    <seclabel type='dynamic' model='dac' relabel='yes'><label>+{user}:+{user}</label></seclabel>
  </domain>
</domstatus>
"""
KNOWN = Recorded(
    pid=7,
    guest=GUEST,
    emulator="/usr/bin/qemu-system-x86_64",
    user=64055,
    monitor="/m/monitor.sock",
)
SEEN = ProcessFacts(
    users=frozenset({64055}), executable="/usr/bin/qemu-system-x86_64",
    command=("qemu-system-x86_64", "-name", "guest=web1", "-uuid", GUEST, ""),
    sockets=frozenset({"/m/monitor.sock"}),
)  # fmt: skip


def test_libvirts_status_is_read() -> None:
    text = STATUS.format(
        pid=7, monitor="/m/monitor.sock", guest=GUEST, user=64055, emulator=KNOWN.emulator
    )
    assert identity.recorded(text) == KNOWN
    assert identity.recorded(text.replace("model='dac'", "model='selinux'")).user is None


@pytest.mark.parametrize("text", ["", "<domain/>", "<domstatus pid='1'/>", "<domstatus", "\0"])
def test_what_is_no_status_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a status file of libvirt"):
        identity.recorded(text)


def test_the_recorded_process_matches() -> None:
    assert identity.mismatch(KNOWN, SEEN) is None
    assert identity.mismatch(replace(KNOWN, user=None), SEEN) is None
    updated = replace(SEEN, executable=f"{SEEN.executable} (deleted)")
    assert identity.mismatch(KNOWN, updated) is None
    script = replace(KNOWN, emulator="/usr/bin/kvm")
    assert identity.mismatch(script, SEEN) is None


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (replace(SEEN, users=frozenset({1000})), "it runs as user 1000, not as QEMU's user 64055"),
        (replace(SEEN, users=frozenset({1000, 64055})), "it runs as user 1000, 64055"),
        (replace(SEEN, executable="/tmp/python3"), "it runs /tmp/python3"),
        (replace(SEEN, command=("qemu", "-name", GUEST)), "does not name the guest"),
        (replace(SEEN, sockets=frozenset()), "not have the monitor socket /m/monitor.sock open"),
    ],
)
def test_another_process_with_its_id_does_not(seen: ProcessFacts, why: str) -> None:
    assert why in str(identity.mismatch(KNOWN, seen))


def test_a_process_of_another_user_is_no_stray() -> None:
    trusted = frozenset({0, 64055})
    assert identity.is_stray(SEEN, GUEST, trusted)
    assert not identity.is_stray(replace(SEEN, users=frozenset({1000})), GUEST, trusted)
    # A set-user-ID program that a local user started with the guest's UUID.
    assert not identity.is_stray(replace(SEEN, users=frozenset({0, 1000})), GUEST, trusted)
    assert not identity.is_stray(replace(SEEN, executable="/usr/bin/grep"), GUEST, trusted)


# A process that holds a socket, as QEMU does, until its standard input ends.
HOLDS = """
import socket, sys
held = socket.socket(socket.AF_UNIX)
held.bind(sys.argv[1])
held.listen()
print("ready", flush=True)
sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts what looks like QEMU, from a program of that name, as a user."""
    monkeypatch.setattr(identity, "STATUS_FILES", tmp_path / "run")
    (tmp_path / "run").mkdir()
    tmp_path.chmod(0o777)
    program = Path(shutil.copy(Path(sys.executable).resolve(), tmp_path / "qemu-fake"))
    for folder in tmp_path.parents:
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def begin(monitor: str, user: int = 0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [program, "-c", HOLDS, tmp_path / monitor, "-uuid", GUEST], user=user, group=user,
            extra_groups=[], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={"PYTHONHOME": sys.base_prefix},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for one in started:
        one.kill()
        one.communicate()


def record(folder: Path, name: str, pid: int, monitor: str = "m", user: int = 0) -> Path:
    file = folder / f"run/{name}.xml"
    file.write_text(
        STATUS.format(
            pid=pid, monitor=folder / monitor, guest=GUEST, user=user,
            emulator=folder / "qemu-fake",
        )
    )  # fmt: skip
    return file


def test_the_process_that_libvirt_recorded_is_held(start: Start, tmp_path: Path) -> None:
    process = start("m")
    record(tmp_path, "web1", process.pid)
    held = identity.hold(GUEST)
    assert held is not None
    with held:
        assert held.pid == process.pid
        assert held.lives()
        held.kill()
        assert held.ended(10.0)
    process.wait()
    assert identity.hold(GUEST) is None
    assert not identity.runs(GUEST)
    with pytest.raises(CannotCapture, match="web1 has no QEMU process on alpha"):
        identity.require(GUEST, "web1", "alpha")


def test_no_process_of_another_user_is_taken_for_it(start: Start, tmp_path: Path) -> None:
    imitation = start("m", user=65534)
    assert identity.hold(GUEST) is None
    # Its ID was that of QEMU, which has ended.
    record(tmp_path, "web1", imitation.pid)
    assert identity.hold(GUEST) is None
    real = start("n")
    record(tmp_path, "web1", real.pid, "n")
    with identity.require(GUEST, "web1", "alpha") as held:
        assert held.pid == real.pid


def test_without_a_recorded_user_it_must_be_one_as_whom_qemu_runs(
    start: Start, tmp_path: Path
) -> None:
    imitation = start("m", user=65534)
    file = record(tmp_path, "web1", imitation.pid)
    file.write_text(file.read_text().replace("model='dac'", "model='selinux'"))
    assert identity.hold(GUEST) is None


def test_without_the_monitors_socket_it_is_another(start: Start, tmp_path: Path) -> None:
    process = start("m")
    record(tmp_path, "web1", process.pid, "elsewhere")
    with pytest.raises(QemuUnclear, match=f"is running in process {process.pid}, which is unknown"):
        identity.hold(GUEST)


def test_two_processes_are_refused(start: Start, tmp_path: Path) -> None:
    first, second = start("m"), start("n")
    record(tmp_path, "web1", first.pid)
    with pytest.raises(QemuUnclear, match="more than one process may be the QEMU"):
        identity.runs(GUEST)
    record(tmp_path, "web2", second.pid, "n")
    with pytest.raises(QemuUnclear, match="more than one process may be the QEMU"):
        identity.runs(GUEST)


@pytest.mark.parametrize("spoil", ["owner", "mode", "link", "folder"])
def test_a_status_that_others_may_write_is_refused(
    start: Start, tmp_path: Path, spoil: str
) -> None:
    file = record(tmp_path, "web1", start("m").pid)
    match spoil:
        case "owner":
            os.chown(file, 65534, 65534)
        case "mode":
            file.chmod(0o666)
        case "link":
            file.symlink_to(file.rename(tmp_path / "real"))
        case _:
            (tmp_path / "run").chmod(0o777)
    with pytest.raises(QemuUnclear, match=r"users other than root can write|symbolic link"):
        identity.hold(GUEST)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_a_process_that_cannot_be_seen_has_not_ended(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    process = start("m")
    record(tmp_path, "web1", process.pid)

    def hidden(pid: int, _: set[str]) -> ProcessFacts:
        raise OSError(error, os.strerror(error), f"/proc/{pid}/exe")

    monkeypatch.setattr(identity, "_seen", hidden)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "_strays", lambda *_: [])
        with pytest.raises(QemuUnclear, match=f"whether process {process.pid} is the guest's"):
            identity.hold(GUEST)
    (tmp_path / "run/web1.xml").unlink()  # nor if libvirt knows nothing of it
    with pytest.raises(QemuUnclear, match=f"whether process {process.pid} is the guest's QEMU"):
        identity.hold(GUEST)


def test_what_an_imitation_hides_is_not_asked_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("m", 65534)

    def hidden(pid: int, _: set[str]) -> ProcessFacts:
        raise PermissionError(errno.EACCES, "no", f"/proc/{pid}/exe")

    monkeypatch.setattr(identity, "_seen", hidden)
    assert identity.hold(GUEST) is None


def test_without_a_free_file_descriptor_nothing_has_ended(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start("m")
    record(tmp_path, "web1", process.pid)

    def full(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", full)
    with pytest.raises(QemuUnclear, match="Too many open files"):
        identity.hold(GUEST)


def test_a_process_that_ends_during_the_search_is_no_qemu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at its files fails, as between the listing of /proc and the look."""
    stat, ended = Path.stat, Path(f"/proc/{os.getpid()}/cmdline")

    def gone(self: Path, **more: bool) -> os.stat_result:
        if self == ended:
            raise ProcessLookupError(errno.ESRCH, "No such process", str(self))
        return stat(self, **more)

    monkeypatch.setattr(Path, "stat", gone)
    assert identity.hold("00000000-0000-0000-0000-00000000dead") is None
