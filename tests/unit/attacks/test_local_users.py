"""A local user of a host who owns a directory in which root works, and swaps all names in it."""

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import (
    NOBODY,
    SECRET,
    Ground,
    ground,
    race,
    user,
    within,
    written_by_qemu_img,
)
from tests.support.replicas import session
from vmckpt.agent.replication import handover, test_failover_files
from vmckpt.agent.restore import replace_file
from vmckpt.agent.restore.files import SmallFiles
from vmckpt.capture import firmware
from vmckpt.capture.disks import bitmaps, live
from vmckpt.capture.memory import memory_files
from vmckpt.capture.nbd import server
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput, RemoteError, StoreError
from vmckpt.remote.scripts import install_agent
from vmckpt.replication.backup import standby_setup
from vmckpt.replication.session import Disk
from vmckpt.store.backend.local import LocalFolder
from vmckpt.units import Bytes
from vmckpt.util import host_directories, host_files
from vmckpt.util.host_files import Folder

SNAPSHOT = "s-aaaaaaaaaaaaaaaa"
UUID = "3e6f1c52-0000-4000-8000-000000000001"
NEW, OLD = (f"image.{SNAPSHOT}.{end}" for end in ("new", "old"))
MARK = ".image.vmckpt-standby"


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Ground]:
    names: tuple[str, ...] = request.param
    with ground(*names) as made:
        yield made


def swaps(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("place", [names], indirect=True, ids=["swaps"])


@swaps("image")
def test_such_a_user_has_its_way_with_root_where_paths_are_used(place: Ground) -> None:
    """Else the tests below would show nothing."""
    image = place.theirs / "image"
    with place.swapped(), within(60):
        while place.untouched():
            with suppress(OSError):
                image.chmod(0o640)


@swaps("image", NEW, OLD)
def test_files_of_a_restore(place: Ground) -> None:
    image = place.theirs / "image"

    def restore() -> None:
        files = {"nvram": b"restored"}
        with SmallFiles(files, {"nvram": str(image)}, SNAPSHOT, replace=True) as made:
            made.write()
            made.swap()
            made.keep()

    with place.swapped():
        tally = race(restore)
    assert tally.both
    assert place.untouched()


@swaps("image", NEW, OLD)
def test_what_recovery_removes_and_puts_back(place: Ground) -> None:
    image = place.theirs / "image"
    new, old = replace_file.paths(image, SNAPSHOT)

    def undone() -> None:
        replace_file.remove(new)
        with suppress(FileNotFoundError):
            replace_file.rename(old, image)

    with place.swapped():
        tally = race(undone)
    assert tally.both
    assert place.untouched()


@swaps("image", MARK)
def test_images_of_a_standby(place: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", written_by_qemu_img)
    disk = Disk(target="vda", size=1 << 20, path=str(place.theirs / "image"), format="qcow2")
    told = session(role="backup", disks=(disk,))

    def made() -> None:
        standby_setup._image(told, disk)
        standby_setup.adopt(told, place.top)

    with place.swapped():
        tally = race(made)
    assert tally.both
    assert place.untouched()
    standby_setup._forget(Path(disk.path))
    standby_setup._image(told, disk)
    seen = Path(disk.path).lstat()
    assert (seen.st_uid, stat.S_IMODE(seen.st_mode)) == (0, 0o600)


@swaps("image", MARK)
def test_another_users_mark_gives_no_image_away(place: Ground) -> None:
    """A mark says that an image is a standby's, which may be removed."""
    image = place.theirs / "image"
    image.write_bytes(b"the disk of a guest")
    (place.theirs / MARK).write_text("forged")
    os.chown(place.theirs / MARK, NOBODY, NOBODY)
    disk = Disk(target="vda", size=1 << 20, path=str(image), format="qcow2")
    with pytest.raises(BadInput, match="is not a standby's image"):
        standby_setup._image(session(disks=(disk,)), disk)
    assert not standby_setup._was_made(session(disks=(disk,)), image)
    assert image.read_bytes() == b"the disk of a guest"


@swaps("image")
def test_images_of_a_test_of_a_standby(place: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", written_by_qemu_img)
    image = place.theirs / "image"

    def made() -> None:
        test_failover_files._make(session(), str(image), 1 << 20, owner=(NOBODY, NOBODY))
        replace_file.remove(image)

    with place.swapped():
        tally = race(made)
    assert tally.both
    assert place.untouched()


@swaps("image", "own")
def test_a_firmwares_file_is_copied_for_a_test(place: Ground) -> None:
    own = place.theirs / "own"

    def copied() -> None:
        test_failover_files.copy_firmware(str(place.theirs / "image"), str(own))

    with place.swapped():
        tally = race(copied)
    assert tally.both
    assert place.untouched()
    with suppress(OSError), Folder(own.parent) as folder:
        assert folder.read("own", 1000) != SECRET


@swaps("image")
def test_no_secret_of_roots_gets_into_a_snapshot(place: Ground) -> None:
    """QEMU's user owns the directory of NVRAM, and gets back what a restore puts there."""
    found: set[bytes] = set()
    described = f"<domain><os><nvram>{place.theirs}/image</nvram></os></domain>"

    def read() -> None:
        found.update(firmware.read(described, UUID, "alpha").values())

    with place.swapped():
        tally = race(read)
    assert tally.both
    assert found <= {b"", b"mine"}


@swaps("image")
def test_a_tpms_state_is_read_from_its_own_folder(
    place: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firmware, "_TPM_FOLDER", place.theirs.parent)
    found: set[bytes] = set()
    tpm = "<tpm><backend type='emulator'/></tpm>"
    described = f"<domain><devices>{tpm}</devices></domain>"

    def read() -> None:
        found.update(firmware.read(described, place.theirs.name, "alpha").values())

    with place.swapped():
        tally = race(read)
    assert tally.both
    assert found <= {b"", b"mine"}


@swaps("image")
def test_the_owner_of_an_image_is_put_back(place: Ground) -> None:
    image = place.theirs / "image"
    image.touch()
    seen = image.stat()

    def given() -> None:
        handover._put_owner_back(str(image), NOBODY, NOBODY, seen.st_dev, seen.st_ino)

    given()
    assert image.stat().st_uid == NOBODY
    with place.swapped():
        tally = race(given)
    assert tally.both
    assert place.untouched()


@swaps("image")
def test_scratch_images_in_qemus_folder(place: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", written_by_qemu_img)
    image = str(place.theirs / "image")

    def made() -> bool:
        try:
            return live._made(image, 1 << 20)
        finally:
            live.remove_left([image])

    outcomes: set[bool] = set()
    with place.swapped():
        race(lambda: outcomes.add(made()), both=False)
    assert True in outcomes
    assert place.untouched()


@swaps("pins", "tmp", "format")
def test_a_store_whose_keeper_is_another_user(place: Ground) -> None:
    store, found = LocalFolder(place.theirs), set[bytes]()

    def used() -> None:
        store.put("pins/s-1", b"pinned", replace=True)
        found.add(store.get("pins/s-1"))
        list(store.keys("pins/"))
        store.delete("pins/s-1")

    def asked() -> None:
        found.add(store.get("format"))

    (place.theirs / "format").write_text("mine")
    with user_of_a_store(place):
        tallies = race(used), race(asked)
    assert all(one.both for one in tallies)
    assert place.untouched()
    assert SECRET not in found


@swaps("format")
def test_a_store_is_not_waited_for_and_no_link_in_it_is_followed(place: Ground) -> None:
    store = LocalFolder(place.theirs)
    os.mkfifo(place.theirs / "fifo")
    (place.theirs / "link").symlink_to(place.bait / "shadow")
    (place.theirs / "pins").symlink_to(place.bait)
    for name in ("link", "pins"):
        os.lchown(place.theirs / name, NOBODY, NOBODY)
    with within(10):
        for key in ("fifo", "link"):
            with pytest.raises(StoreError, match="is not a regular file"):
                store.get(key)
        for work in (lambda: store.put("pins/x", b"x"), lambda: store.get("pins/shadow")):
            with pytest.raises(
                StoreError, match="leads through a symbolic link owned by user 65534"
            ):
                work()
    assert place.untouched()
    # What root itself has put on another disk is followed.
    os.lchown(place.theirs / "pins", 0, 0)
    assert store.get("pins/shadow") == SECRET


# What is opened by a path of the operator's choice is not root's to defend: only what is in it.
_INSIDE = """
import os, random, sys
folder, bait, *names = sys.argv[1:]
print("ready", flush=True)
while True:
    for name in names:
        path = folder + "/" + name
        try:
            os.rename(path, path + ".aside")
            if random.randrange(2):
                os.symlink(bait, path)
            else:
                os.mkfifo(path)
        except OSError:
            pass
        try:
            os.unlink(path)
        except OSError:
            pass
        try:
            os.rename(path + ".aside", path)
        except OSError:
            pass
"""


def user_of_a_store(place: Ground) -> Any:
    return user(_INSIDE, str(place.theirs), str(place.bait), *place.names)


# In a directory like /tmp or /dev/shm.
_FIRST = """
import os, random, sys
top, bait, *names = sys.argv[1:]
print("ready", flush=True)
while True:
    for name in names:
        path = top + "/" + name
        try:
            random.choice((os.mkdir, os.mkfifo, lambda one: os.symlink(bait, one)))(path)
        except OSError:
            pass
        for undo in (os.rmdir, os.unlink):
            try:
                undo(path)
            except OSError:
                pass
"""


@pytest.fixture
def sticky() -> Iterator[Ground]:
    with ground("versions") as made:
        made.top.chmod(0o1777)
        yield made


def _is_roots(path: Path) -> bool:
    seen = path.lstat()
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == 0 and not seen.st_mode & 0o022


def test_directories_of_agents_where_everybody_makes_directories(
    sticky: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /dev/shm is; /run itself is root's."""
    run = sticky.top / "run"
    monkeypatch.setattr(host_directories, "RUN", run)
    monkeypatch.setattr(host_directories, "SHM", sticky.top)
    wrong: list[Path] = []

    def made() -> None:
        paths = (
            host_directories.run_dir("replication", UUID),
            host_directories.memory_dir("snapshots"),
        )
        wrong.extend(one for path in paths for one in (path, path.parent) if not _is_roots(one))
        shutil.rmtree(host_directories.memory_dir())
        shutil.rmtree(run)

    with user(_FIRST, str(sticky.top), str(sticky.bait), "run"):
        tally = race(made)
    assert (tally.both, wrong, sticky.untouched()) == (True, [], True)


def test_the_agents_versions_where_everybody_makes_directories(sticky: Ground) -> None:
    versions = sticky.top / "versions"
    wrong: list[Path] = []

    def made() -> None:
        try:
            install_agent.make(versions)
        except install_agent.InstallRefused as exc:
            raise OSError(str(exc)) from exc
        if not _is_roots(versions):
            wrong.append(versions)
        versions.rmdir()

    with user(_FIRST, str(sticky.top), str(sticky.bait), "versions"):
        tally = race(made)
    assert (tally.both, wrong, sticky.untouched()) == (True, [], True)


@swaps("state")
def test_an_agents_state_that_another_user_can_change_is_refused(place: Ground) -> None:
    for path in (place.theirs, place.theirs / "agent" / "replica"):
        with pytest.raises(RemoteError, match=r"home belongs to user 65534, so it is not safe"):
            host_directories.check_state(path)
    # Root may have put it on another disk, and another user may not.
    own, link = place.top / "own", place.top / "link"
    own.mkdir()
    link.symlink_to(own)
    host_directories.check_state(link / "agent")
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(RemoteError, match="leads through a symbolic link owned by user 65534"):
        host_directories.check_state(link / "agent")


@swaps("state")
def test_a_link_that_another_user_can_move_away_leads_to_no_state(place: Ground) -> None:
    """Root's link to root's directory, in a directory of the user's: only the link can be renamed,
    and something else put in its place."""
    own = place.top / "own"
    own.mkdir()
    (place.theirs / "link").symlink_to(own)
    with pytest.raises(RemoteError, match=r"home belongs to user 65534, so it is not safe"):
        host_directories.check_state(place.theirs / "link" / "agent")


@swaps("state")
def test_an_agents_state_is_refused_at_whatever_moment_it_is_looked_at(place: Ground) -> None:
    """The user shows a link to root's directory at one moment, and a directory at the next."""
    path = place.theirs / "agent"
    with place.swapped():
        tally = race(lambda: host_directories.check_state(path))
    assert (tally.done, place.untouched()) == (0, True)


@swaps("state")
def test_no_order_is_carried_out_in_another_users_state(place: Ground) -> None:
    told = (
        '{"do": "line", "gives": true, "guest": "u", "store": "near", "snapshot": "s-1",'
        f' "state": "{place.theirs}"}}\n'
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "vmckpt.agent.main"], input=told, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "belongs to user 65534, so it is not safe for files that root uses" in done.stdout
    assert list(place.theirs.iterdir()) == []


@swaps("state")
def test_nothing_is_imported_from_the_current_directory(
    place: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may be in any when it runs a command."""
    for name in ("json.py", "vmckpt.py", "logging.py"):
        (place.theirs / name).write_text("raise SystemExit('not ours')")
    from vmckpt.agent import client  # noqa: PLC0415
    from vmckpt.agent.replication import watchdog  # noqa: PLC0415
    from vmckpt.app import subprocesses  # noqa: PLC0415

    for words in (
        [sys.executable, *client._MODULE, "--version"],
        [*subprocesses.PROGRAM, "--help"],
    ):
        done = subprocess.run(words, cwd=place.theirs, capture_output=True, text=True, check=False)
        assert (done.returncode, "not ours" in done.stderr) == (0, False), done.stderr
    assert "-P" in watchdog.agent_command(place.theirs)


def test_permissions_of_a_program_are_not_taken_over(tmp_path: Path) -> None:
    """A guest's disk can begin as a program does; its image must never become root's program."""
    image, before = tmp_path / "image", tmp_path / "before"
    before.touch()
    before.chmod(0o6755)
    with image.open("wb") as file:
        host_files.as_before(file.fileno(), before.stat())
    assert stat.S_IMODE(image.stat().st_mode) == 0o644


@swaps("image")
def test_a_restored_image_takes_nothing_over_from_what_a_link_leads_to(place: Ground) -> None:
    (place.theirs / "image").symlink_to("/usr/bin/su")
    os.lchown(place.theirs / "image", NOBODY, NOBODY)
    with closing(replace_file.Replacement(place.theirs / "image", SNAPSHOT)) as one:
        os.write(one.create(), b"\x7fELF")
        with pytest.raises(OSError, match="leads through a symbolic link owned by user 65534"):
            one.swap()
        one.take_back()
    assert [path.name for path in place.theirs.iterdir()] == ["image"]


def _mapped_as(flags: int, protection: int, file: Path) -> Path | None:
    import mmap  # noqa: PLC0415

    opened = os.open(file, flags)
    try:
        with mmap.mmap(opened, 1 << 20, flags=mmap.MAP_SHARED, prot=protection):
            return memory_files._mapped(os.getpid(), 1 << 20, str(file))
    finally:
        os.close(opened)


def test_memory_that_qemu_cannot_write_is_not_written_for_it(tmp_path: Path) -> None:
    """A QEMU that a guest took over can map any file that it can read."""
    file = tmp_path / "pc.ram"
    file.write_bytes(bytes(1 << 20))
    assert _mapped_as(os.O_RDONLY, 1, file) is None
    assert _mapped_as(os.O_RDWR, 3, file) is not None


def test_nothing_is_run_in_a_mount_namespace_that_another_user_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = "import time; print('ready', flush=True); time.sleep(600)"
    own = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", waits]
    with subprocess.Popen(own, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            monkeypatch.setattr(bitmaps, "as_it_runs", lambda _: ["--reuid", "1"])
            ran: list[object] = []
            monkeypatch.setattr(subprocess, "run", lambda *words, **_: ran.append(words))
            assert bitmaps._closed(process.pid, ["/etc/shadow"]) == []
            assert ran == []
        finally:
            process.kill()


@swaps("nbd")
def test_a_socket_that_accepts_nothing_is_not_waited_for(place: Ground) -> None:
    path = place.theirs / "nbd"
    with socket.socket(socket.AF_UNIX) as theirs, socket.socket(socket.AF_UNIX) as fills:
        theirs.bind(str(path))
        theirs.listen(0)
        fills.connect(str(path))
        export = Export(size=Bytes(512), read=lambda _, length: bytes(length))
        with within(10), pytest.raises(BadInput, match="another server is listening on"):
            server.Server({"": export}, Unix(str(path)))


def _bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


PLANTS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a link": lambda path: path.symlink_to("/etc/shadow"),
    "a socket": _bound,
    "a directory": Path.mkdir,
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=list(PLANTS))
@swaps("image")
def test_what_is_no_regular_file_is_refused_at_once(
    place: Ground, plant: Callable[[Path], None]
) -> None:
    path = place.theirs / "image"
    plant(path)
    os.lchown(path, NOBODY, NOBODY)
    with within(10), Folder(place.theirs) as folder:
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            with pytest.raises(OSError) as caught:  # noqa: PT011 - as the kernel calls it
                folder.open("image", flags)
            assert caught.value.filename == str(path)
        with pytest.raises(FileExistsError):
            folder.create("image")
