"""What root's shell does on a host in directories of another user, and which programs it runs."""

import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.hostile import NOBODY, Ground, ground, user, within
from tests.support.shell import Shell
from vmckpt.agent import client
from vmckpt.errors import RemoteError
from vmckpt.model.disk import DiskCopy, Made
from vmckpt.remote import agent_install, image_copy, images, probe, ssh
from vmckpt.remote.shell_files import FILES
from vmckpt.remote.ssh import Answer
from vmckpt.units import MIB, Bytes, Seconds

ROUNDS = [pytest.param(20, id="some"), pytest.param(1_000, id="many", marks=pytest.mark.long)]
NEW = "image.vmckpt-1"


@pytest.fixture
def place() -> Iterator[Ground]:
    with ground("image", NEW) as made:
        yield made


def copy_of(place: Ground) -> DiskCopy:
    return DiskCopy(
        name="vda", source="/vda", path=str(place.theirs / "image"), format="qcow2",
        size=Bytes(MIB), needed=Bytes(MIB), allocated=Bytes(MIB), full=False, options="",
        mode="644",
    )  # fmt: skip


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_images_of_a_copy(place: Ground, rounds: int) -> None:
    host, copy = Shell(place.top), copy_of(place)
    made = Made(host="alpha", suffix="vmckpt-1", marks={copy.path: ""})
    done = 0
    with place.swapped(), within(600):
        for _ in range(rounds):
            with suppress(RemoteError):
                mark = await images.create(host, copy, made.temporary(copy.path))
                known = Made(host="alpha", suffix="vmckpt-1", marks={copy.path: mark})
                done += 1
                await images.publish(host, known)
                await images.take_room(host, copy.path, Bytes(MIB))
                await images.marks(host, [copy.path], held=True)
            await images.remove(host, made, patience=Seconds(0.0))
    assert place.untouched()


class Meddled(Shell):
    """A host on which the user's moment comes right after one program has run."""

    def __init__(self, place: Ground, program: str, word: str) -> None:
        """`word`: only if that is among the program's arguments."""
        super().__init__(place.top)
        own, image = place.top / program, place.theirs / NEW
        own.write_text(
            f'#!/bin/sh\n/usr/bin/{program} "$@" || exit\n'
            f'case "$*" in *"{word}"*) ;; *) exit ;; esac\n'
            f"ln -sf {place.bait}/shadow {image}; chown -h nobody {image}\n"
        )
        own.chmod(0o755)

    async def run(
        self, args: Sequence[str], *, text: str = "", limit: Seconds = ssh.COMMAND_LIMIT
    ) -> Answer:
        return await super().run(args, text=f"PATH={self.folder}:$PATH\n{text}", limit=limit)


@pytest.mark.parametrize(
    ("program", "word"), [("dd", ""), ("stat", "%s %h"), ("qemu-img", "create"), ("chmod", "644")]
)
async def test_an_image_that_is_swapped_between_two_steps(
    place: Ground, program: str, word: str
) -> None:
    with suppress(RemoteError):
        path = f"{copy_of(place).path}.vmckpt-1"
        await images.create(Meddled(place, program, word), copy_of(place), path)
    assert (place.theirs / NEW).is_symlink()
    assert place.untouched()


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_the_proof_of_shared_storage(place: Ground, rounds: int) -> None:
    host = Shell(place.top)
    with place.swapped(), within(600):
        for _ in range(rounds):
            with suppress(RemoteError):
                await probe.same_files(host, host, [str(place.theirs / "image")])
    assert place.untouched()


# Makes every file that it sees a program be asked for.
_FORGES = """
import os, re, sys
folder = sys.argv[1]
print("ready", flush=True)
while True:
    for process in os.listdir("/proc"):
        try:
            with open("/proc/" + process + "/cmdline") as words:
                names = re.findall(r"[.]vmckpt-probe-[A-Za-z0-9]+", words.read())
            for name in names:
                with open(folder + "/" + name, "w") as forged:
                    forged.write("0" * 32)
        except OSError:
            pass
"""


class Elsewhere(Shell):
    """A host that has a directory of another host at another place."""

    def __init__(self, folder: Path, there: Path) -> None:
        super().__init__(folder)
        self.there = there

    async def run(
        self, args: Sequence[str], *, text: str = "", limit: Seconds = ssh.COMMAND_LIMIT
    ) -> Answer:
        answer = await super().run(
            [one.replace(str(self.folder), str(self.there)) for one in args], text=text, limit=limit
        )
        out = answer.out.replace(str(self.there), str(self.folder))
        return Answer(status=answer.status, out=out, err=answer.err)


async def test_a_user_of_both_hosts_cannot_forge_the_proof(place: Ground, tmp_path: Path) -> None:
    """A guest that moves without its disks would start from that user's."""
    (tmp_path / "image").touch()
    (place.theirs / "image").touch()
    image = str(tmp_path / "image")
    source, target = Shell(tmp_path), Elsewhere(tmp_path, place.theirs)
    with user(_FORGES, str(place.theirs)), within(120):
        for _ in range(25):
            assert await probe.same_files(source, target, [image]) == {image: False}
    assert await probe.same_files(source, source, [image]) == {image: True}
    assert names(tmp_path) == ["image"]


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def sh(script: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["sh", "-s", "--", *words], input=script, capture_output=True, text=True, check=False,
        timeout=10,
    )  # fmt: skip


ENTER = FILES + 'enter "$1"; status=$?; pwd; exit $status'


def test_a_directory_is_entered_over_links_of_root_alone(place: Ground) -> None:
    own = place.theirs / "own dir\n"
    own.mkdir()
    (place.top / "link\n").symlink_to("home/images")
    (place.theirs / "deeper").symlink_to(own.name)
    found = sh(ENTER, f"{place.top}/link\n/{own.name}/../{own.name}")
    assert (found.returncode, found.stdout) == (0, f"{own}\n")
    # A link of root's, where another user could put another one.
    found = sh(ENTER, f"{place.theirs}/deeper")
    assert "other users can replace the symbolic link deeper" in found.stderr
    os.lchown(place.theirs / "deeper", NOBODY, NOBODY)
    found = sh(ENTER, f"{place.theirs}/deeper")
    assert (found.returncode, "is a symbolic link of another user" in found.stderr) == (1, True)
    assert sh(ENTER, f"{place.theirs}/none/there").returncode == 2
    (place.top / "round").symlink_to("round")
    assert "too many links" in sh(ENTER, f"{place.top}/round").stderr


HOLD = FILES + 'enter "$1" && hold "$2" && cat /proc/self/fd/4'


@pytest.mark.parametrize("plant", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("real")])
def test_what_is_no_regular_file_is_not_opened(
    place: Ground, plant: Callable[[Path], None]
) -> None:
    (place.theirs / "real").write_text("an image")
    assert sh(HOLD, str(place.theirs), "real").stdout == "an image"
    plant(place.theirs / "image")
    found = sh(HOLD, str(place.theirs), "image")
    assert (found.returncode, "image is not a regular file" in found.stderr) == (1, True)


def test_a_copy_is_not_served_out_of_what_a_link_leads_to(place: Ground) -> None:
    (place.theirs / "image").symlink_to(place.bait / "image")
    os.lchown(place.theirs / "image", NOBODY, NOBODY)
    serve = ["sh", "-c", image_copy.SERVE, "sh", "127.0.0.1", "raw", str(place.theirs / "image")]
    done = subprocess.run(
        serve, input='{"key": "00"}\n', capture_output=True, text=True, check=False, timeout=10
    )
    assert done.returncode == 1
    assert "image is not a regular file" in done.stderr
    assert place.untouched()


@pytest.mark.parametrize(("told", "mode"), [("4755", "644"), ("600", "600"), ("7777", "666")])
def test_no_host_makes_a_program_of_an_image_on_another(told: str, mode: str) -> None:
    """With the content of its disk and root's rights."""
    text = '{"virtual-size": 512, "format": "raw"}'
    assert images.parse(text, told, "raw").mode == mode


class Programs:
    """A directory with a program that writes down that it ran."""

    def __init__(self, folder: Path, ran: Path) -> None:
        self.program, self.ran = folder / "python3", ran
        folder.mkdir(exist_ok=True)
        self.program.write_text(f"#!/bin/sh\ntouch {ran}\necho 1.0\n")
        self.program.chmod(0o755)

    def found(self, boot: str = "another") -> bool:
        """Whether an order would run it."""
        self.ran.unlink(missing_ok=True)
        path = f"PATH=/usr/bin:/bin\n{client._FIND}"
        done = sh(path, str(self.program), "1.0", boot)
        assert self.ran.exists() == (done.stdout == f"{self.program}\n")
        return self.ran.exists()


def _given(path: Path) -> None:
    os.lchown(path, NOBODY, NOBODY)


def _open(path: Path) -> None:
    path.chmod(0o777)


def _groups(path: Path) -> None:
    os.chown(path, 0, NOBODY)
    path.chmod(0o775)


def _linked(path: Path) -> None:
    """In a sticky directory, as /tmp: it can be led elsewhere at any moment."""
    path.parent.chmod(0o1777)
    path.symlink_to(path.rename(path.with_name("elsewhere")))
    os.lchown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("spoil", [_given, _open, _groups, _linked])
def test_the_controllers_own_path_is_no_program_if_another_user_can_make_it(
    place: Ground, spoil: Callable[[Path], None]
) -> None:
    """/home/ann/venv/bin/python may be another Ann's on that host."""
    one = Programs(place.top / "venv", place.top / "ran")
    assert one.found()
    spoil(one.program.parent)
    assert not one.found()
    # The same machine: it is the program that runs here.
    assert one.found(client._boot())


@pytest.mark.parametrize("spoil", [_given, _open, _groups])
def test_neither_is_one_that_another_user_can_change(
    place: Ground, spoil: Callable[[Path], None]
) -> None:
    one = Programs(place.top / "venv", place.top / "ran")
    spoil(one.program)
    assert not one.found()


@pytest.mark.parametrize("spoil", [_given, _open, _groups, _linked])
def test_an_installed_agent_is_not_started_where_another_user_can_change_it(
    place: Ground, spoil: Callable[[Path], None]
) -> None:
    version, ran = place.top / "versions" / "1.0", place.top / "ran"
    (version / "bin").mkdir(parents=True)
    launcher = version / agent_install.LAUNCHER
    launcher.write_text(f"#!/bin/sh\ntouch {ran}\n")
    launcher.chmod(0o755)
    assert "found" in sh(agent_install._LOOK, str(version), "python3").stdout
    ran.unlink()
    spoil(version)
    assert "found" not in sh(agent_install._LOOK, str(version), "python3").stdout
    assert not ran.exists()


async def test_an_image_is_made_whole_and_private_until_it_has_its_mode(place: Ground) -> None:
    host, copy = Shell(place.top), copy_of(place)
    mark = await images.create(host, copy, f"{copy.path}.vmckpt-1")
    seen = (place.theirs / NEW).lstat()
    assert re.fullmatch(rf"{seen.st_dev}:{seen.st_ino} .+", mark)
    assert (seen.st_uid, stat.S_IMODE(seen.st_mode)) == (0, 0o644)
    with pytest.raises(RemoteError, match="File exists"):
        await images.create(host, copy, f"{copy.path}.vmckpt-1")
