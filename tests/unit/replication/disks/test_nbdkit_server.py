"""The nbdkit beside each replicated disk: who it is, who reaches it, and how it ends."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_logs import LIMIT, SIZE, Served, alive, records, serving, until
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.errors import BadInput, HypervisorError
from vmckpt.replication.backup.standby import NbdWriter
from vmckpt.replication.disks import nbdkit_server
from vmckpt.replication.disks.epoch_log import DiskLogError, LogPlace, WriteLog
from vmckpt.replication.disks.log_control import Control
from vmckpt.units import Bytes


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def test_the_server_is_nobodys_child_and_is_found_again(served: Served) -> None:
    process = served.start()
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines()
    )

    assert int(status["PPid"]) != os.getpid()
    assert os.getsid(process) != os.getsid(0)
    assert nbdkit_server.running(served.place) == process
    assert served.start() == process


def test_one_that_was_killed_is_not_running_and_another_begins_anew(served: Served) -> None:
    process = served.start()
    with served.guest() as guest:
        guest.write(0, b"x" * 512)
        guest.wait()
        os.kill(process, signal.SIGKILL)
        until(lambda: nbdkit_server.running(served.place) is None)
        with pytest.raises(HypervisorError, match=r"closed the connection|Broken pipe|reset"):
            guest.read(0, 512)

    assert served.start() != process
    assert served.log().size() == 0


def test_one_that_exits_at_once_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbdkit_server.stop(served.place, served.socket)
    launch = nbdkit_server._launch

    def killed(place: LogPlace, *words: Any, **more: Any) -> None:
        launch(place, *words, **more)
        until(lambda: nbdkit_server.running(place) is not None)
        process = nbdkit_server.running(place)
        assert process is not None
        os.kill(process, signal.SIGKILL)
        until(lambda: nbdkit_server.running(place) is None)

    monkeypatch.setattr(nbdkit_server, "_launch", killed)
    monkeypatch.setattr(nbdkit_server, "_STARTS", 5.0)
    with pytest.raises(DiskLogError, match=r"nbdkit \(process \d+\) has exited"):
        served.start()


def test_after_the_end_nothing_is_left(served: Served) -> None:
    process = served.start()
    nbdkit_server.stop(served.place, served.socket)
    nbdkit_server.stop(served.place, served.socket)

    assert not alive(process)
    assert list(served.place.folder.iterdir()) == list(served.socket.path.parent.iterdir()) == []
    with pytest.raises(DiskLogError, match="cannot be opened"):
        WriteLog(served.place)


def test_a_process_that_only_has_its_number_is_left_alone(served: Served) -> None:
    process = served.start()
    with subprocess.Popen(["sleep", "60"]) as other, Control(served.place.control) as control:
        control.process = other.pid
        assert nbdkit_server.running(served.place) is None
        control.process, real = other.pid, process
        nbdkit_server.stop(served.place, served.socket)
        assert other.poll() is None
        other.kill()
    os.kill(real, signal.SIGKILL)


CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def test_only_the_user_that_is_named_reaches_the_socket() -> None:
    def connects(user: int) -> bool:
        return subprocess.run(
            ["/usr/bin/python3", "-c", CONNECT, str(socket.path)],
            user=user, group=user, extra_groups=[], stderr=subprocess.DEVNULL, check=False,
        ).returncode == 0  # fmt: skip

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as undo:
        folder = Path(name)
        folder.chmod(0o711)
        socket = nbdkit_server.Socket(path=folder / "open" / "disk0.sock", owner=(54321, 54321))
        place = LogPlace(folder=folder / "private", disk=0)
        undo.callback(nbdkit_server.stop, place, socket)
        process = nbdkit_server.start(place, socket, size=Bytes(SIZE), limit=Bytes(LIMIT))

        assert (connects(54321), connects(54322)) == (True, False)
        assert Path(f"/proc/{process}").stat().st_uid == 54321
        with NbdWriter(Unix(str(socket.path)), "", host="here") as guest:
            guest.write(0, b"x" * 512)
            guest.flush()
        with WriteLog(place) as log:
            assert len(records(log)) == 1
        assert place.folder.stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_served_is_said_and_leaves_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbdkit_server.stop(served.place, served.socket)
    long = nbdkit_server.Socket(path=served.place.folder / ("x" * 100))
    with pytest.raises(BadInput, match="too long"):
        nbdkit_server.start(served.place, long, size=Bytes(SIZE), limit=Bytes(LIMIT))
    with monkeypatch.context() as changed:
        changed.setattr(nbdkit_server, "_PLUGIN", Path("/nowhere.py"))
        with pytest.raises(DiskLogError, match=r"nbdkit did not start: .*nowhere"):
            served.start()
    with monkeypatch.context() as changed:
        changed.setenv("PATH", "/nowhere")
        with pytest.raises(DiskLogError, match="install nbdkit and nbdkit-plugin-python"):
            served.start()

    assert nbdkit_server.running(served.place) is None


def test_whether_it_is_installed_is_known_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert nbdkit_server.installed()
    (tmp_path / "nbdkit").write_text("#!/bin/sh\necho no such plugin >&2\nexit 1\n")
    (tmp_path / "nbdkit").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not nbdkit_server.installed(), "nbdkit without the plugin"
    (tmp_path / "nbdkit").unlink()
    assert not nbdkit_server.installed()
