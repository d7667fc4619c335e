"""The other ends of NBD connections: QEMU's own programs, and a server that keeps to a script."""

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vmckpt.capture.nbd.protocol import Unix


def run(*words: object) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def image(path: Path, size: str, *writes: str, options: str = "compat=1.1") -> Path:
    """A new qcow2 image with these qemu-io commands done to it."""
    run("qemu-img", "create", "-q", "-f", "qcow2", "-o", options, path, size)
    write(path, *writes)
    return path


def write(path: Path, *commands: str) -> None:
    for command in commands:
        run("qemu-io", "-f", "qcow2", "-c", command, path)


@contextmanager
def qemu_nbd(path: Path, *more: str, kind: str = "qcow2") -> Iterator[Unix]:
    """A real server for an image, as the export "vda"."""
    place = path.with_suffix(".sock")
    words = ["qemu-nbd", "-r", "-t", "-e", "4", "-f", kind, "-x", "vda", "-k", str(place), *more]
    server = subprocess.Popen([*words, str(path)], stderr=subprocess.PIPE, text=True)
    give_up = time.monotonic() + 10.0
    try:
        while not listens(place):
            assert server.poll() is None, server.communicate()
            assert time.monotonic() < give_up
            time.sleep(0.01)
        yield Unix(str(place))
    finally:
        server.kill()
        server.communicate()


def listens(place: Path) -> bool:
    """A socket has a name before anybody listens at it."""
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(str(place))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


@contextmanager
def scripted(folder: Path, talk: Callable[[socket.socket], None]) -> Iterator[Unix]:
    """A server that does with its only client what `talk` does."""
    path = folder / "scripted.sock"
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def serve() -> None:
        connected, _ = listening.accept()
        with connected:
            try:
                talk(connected)
            except OSError:
                pass  # the client has gone

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Unix(str(path))
    finally:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(path))  # in case nobody did
        thread.join()
        listening.close()
