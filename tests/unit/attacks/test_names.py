"""No shell ever reads what somebody called something: by the look of the code, and by trying."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paths import ROOT
from tests.support.shell import HOSTILE, Shell
from vmckpt.errors import RemoteError
from vmckpt.model.disk import Made
from vmckpt.model.host import Host, SshAddress
from vmckpt.remote import images, measure, probe, ssh
from vmckpt.remote.ssh import Answer, Remote, command_line
from vmckpt.units import Bytes

SOURCES = sorted(path for room in ("vmckpt", "tui") for path in (ROOT / room).rglob("*.py"))
SHELLS = {"sh", "bash", "dash", "/bin/sh", "/bin/bash", "ssh", "su", "eval"}
# What takes a line for a shell, or can.
FORBIDDEN = {
    "system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell",
    "subprocess_shell", "spawnl", "spawnlp", "execl", "execlp", "invoke_shell",
}  # fmt: skip
PROCESSES = {"run", "Popen", "call", "check_call", "check_output", "create_subprocess_exec"}
THE_ONE_PLACE = "vmckpt/remote/ssh.py"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


@cache
def every_call() -> list[tuple[str, ast.Call]]:
    return [(str(path.relative_to(ROOT)), call) for path in SOURCES for call in calls(path)]


def name_of(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def test_no_call_takes_a_line_for_a_shell() -> None:
    for path, call in every_call():
        name = name_of(call)
        assert name not in FORBIDDEN, (path, call.lineno, name)
        assert not any(word.arg == "shell" for word in call.keywords), (path, call.lineno)
        if name in PROCESSES and call.args:
            # A list, or a name that holds one; never a text or one put together.
            text = ast.JoinedStr | ast.BinOp | ast.Constant
            assert not isinstance(call.args[0], text), (path, call.lineno)


def test_one_place_makes_the_line_that_a_host_runs() -> None:
    found = {
        (path, name_of(call))
        for path, call in every_call()
        if name_of(call) in {"exec_command", "command_line", "invoke_subsystem"}
        or (name_of(call) == "join" and ast.unparse(call.func) == "shlex.join")
    }

    assert found == {
        (THE_ONE_PLACE, "command_line"), (THE_ONE_PLACE, "exec_command"), (THE_ONE_PLACE, "join"),
        ("tui/web.py", "join"),  # what this machine runs for each browser
        ("vmckpt/doctor/checks.py", "join"),  # a hint, which an operator types
    }  # fmt: skip


def test_that_line_is_quoted_and_nothing_else_is_sent() -> None:
    place = ROOT / THE_ONE_PLACE
    made = [ast.unparse(one) for one in _assigned(tree_of(place), "line")]
    sent = [call for call in calls(place) if name_of(call) == "exec_command"]

    assert {ast.unparse(call.args[0]) for call in sent} == {"line"}
    assert "command_line(args)" in made
    assert "shlex.join(args).encode('utf-8', 'surrogateescape')" in made


def test_a_script_for_a_shell_is_always_a_constant() -> None:
    """["sh", "-c", SCRIPT, …]: names go in beside the script, never into it."""
    for path in SOURCES:
        lists = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.List)]
        for words in lists:
            plain = [one.value if isinstance(one, ast.Constant) else None for one in words.elts]
            shell = SHELLS & {one for one in plain if isinstance(one, str)}
            if shell and "-c" in plain:
                script = words.elts[plain.index("-c") + 1]
                assert _is_constant(tree_of(path), script), (path.name, script.lineno)


def test_what_a_shell_reads_from_its_input_is_a_constant() -> None:
    for path, call in every_call():
        words = [ast.unparse(one) for one in call.args]
        if any("'sh', '-s'" in one or "'bash', '-s'" in one for one in words):
            (script,) = [word.value for word in call.keywords if word.arg in ("text", "input")]
            assert _is_constant(tree_of(ROOT / path), script), (path, call.lineno)


def _is_constant(tree: ast.AST, script: ast.expr) -> bool:
    if isinstance(script, ast.Name):
        values = _assigned(tree, script.id)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and script.id in {one.name for one in node.names}:
                tree = tree_of(ROOT / f"{str(node.module).replace('.', '/')}.py")
                values = _assigned(tree, script.id)
        return bool(values) and all(_is_constant(tree, one) for one in values)
    if isinstance(script, ast.BinOp) and isinstance(script.op, ast.Add):
        return _is_constant(tree, script.left) and _is_constant(tree, script.right)
    return isinstance(script, ast.Constant)


def _assigned(tree: ast.AST, name: str) -> list[ast.expr]:
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]


def echoed(arguments: Sequence[str], folder: Path) -> list[bytes]:
    """What a program gets, when a shell runs the line as an ssh server has it do."""
    line = command_line(["printf", "%s\\0", *arguments])
    done = subprocess.run(
        [b"/bin/sh", b"-c", line], capture_output=True, check=True, cwd=folder, timeout=10
    )
    return done.stdout.split(b"\0")[:-1]


def test_every_hostile_name_arrives_as_it_is(tmp_path: Path) -> None:
    assert echoed(HOSTILE, tmp_path) == [os.fsencode(one) for one in HOSTILE]
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
        | st.text("'\"\\$`;&|<>(){}[]*?!~#=% \n\t-", max_size=12),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_any_name_arrives_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp()

    assert echoed(names, folder) == [name.encode() for name in names]


@pytest.mark.parametrize("name", ["a\0b", "\0", "\ud800"])
def test_what_no_line_can_carry_is_refused(name: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whichever of Python's words
        command_line(["rm", name])


NAMES = [one for one in HOSTILE if one and "/" not in one and one.isascii() and len(one) < 200]


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


async def test_files_with_hostile_names_are_the_same_on_both_hosts(tmp_path: Path) -> None:
    files = []
    for name in NAMES:
        (tmp_path / f"d{name}").mkdir(exist_ok=True)
        file = tmp_path / f"d{name}" / name
        if name.strip("."):
            file.touch()
            files.append(str(file))
    before = contents(tmp_path)
    host = Shell(tmp_path)

    same = await probe.same_files(host, host, files)

    assert same == dict.fromkeys(files, True)
    assert contents(tmp_path) == before


async def test_images_with_hostile_names_are_looked_for_and_removed(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in NAMES if name.strip(".") and "\n" not in name]
    host = Shell(tmp_path)

    places = await images.places(host, paths)
    left = await images.remove(
        host, Made(host="alpha", suffix="new", marks=dict.fromkeys(paths, "$(touch pwned)"))
    )

    assert [place.exists for place in places.values()] == [False] * len(paths)
    assert left == {}
    assert contents(tmp_path) == set()


async def test_a_probe_of_hostile_folders_finds_their_room(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in NAMES if name.strip(". ") and "\n" not in name]
    for folder in folders:
        folder.mkdir()

    seen = await probe.probe_host(Shell(tmp_path), map(str, folders))

    assert {path for path in map(str, folders) if path == path.strip()} <= set(seen.storage_free)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b"])
async def test_a_guest_with_a_path_for_a_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RemoteError, match="is not a valid guest name"):
        await ssh.drop(Shell(tmp_path), name)


@pytest.mark.parametrize("name", NAMES)
async def test_streams_of_a_guest_with_any_name_are_none_here(tmp_path: Path, name: str) -> None:
    if "\0" not in name:
        assert await ssh.drop(Shell(tmp_path), f"none such {name}") == 0
    assert contents(tmp_path) == set()


class Liar(Remote):
    """A host that says what it likes, and remembers what it was told to do."""

    def __init__(self, out: str, *, status: int = 0) -> None:
        super().__init__(Host(name="liar", uri="qemu:///system", ssh=SshAddress(address="a")))
        self.answer = Answer(status=status, out=out, err=out)
        self.told: list[list[str]] = []

    async def run(self, args: Sequence[str], **_options: Any) -> Answer:
        self.told.append(list(args))
        return self.answer


LIES = [
    "", "\n", "Welcome!\n", "/etc/passwd\n", "/srv/.vmckpt-probe-../../etc/x\n", "[" * 100_000,
    "{}", "[]", "null", "7", "x" * 1_000_000, "\0" * 5, "/\0/\0/\0", '{"port": "; reboot"}',
    '{"port": NaN, "samples": -1, "marks": [[0, 1]]}', "\x1b]0;title\x07", "clock " + "9" * 500,
    "clock 1\nroom x /srv\n", "y y y y", "y y 1 99999999999999999999999999", "\ud800",
    '{"virtual-size": -1}', '{"virtual-size": 1, "format-specific": 7}', '{"virtual-size": null}',
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
async def test_a_lie_removes_nothing_and_is_told_in_one_line(lie: str) -> None:
    host, files = Liar(lie), ["/srv/a.raw", "/srv/b.raw"]
    told = ""
    try:
        await probe.same_files(host, host, files)
    except RemoteError as exc:
        told = str(exc)

    assert "\n" not in told
    # Nothing that it said is a name for what it is told to do.
    named = {words[-1] for words in host.told} - set(files)
    assert all(re.fullmatch(r"\.vmckpt-probe-[0-9a-f]{16}", one) for one in named)


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
@pytest.mark.parametrize("status", [0, 1])
async def test_a_lie_is_an_answer_or_one_line(lie: str, status: int) -> None:
    host = Liar(lie, status=status)
    asked = [
        probe.probe_host(host, ["/srv"]), probe.post_copy(host), probe.peer_login(host, "qemu:///system"),
        images.describe(host, "/a", "qcow2"), images.places(host, ["/a"]),
        measure.link(host, host, "10.0.0.1"), ssh.drop(host, "web1"),
    ]  # fmt: skip
    for question in asked:
        try:
            told = str(await question)
        except RemoteError as exc:
            told = str(exc)
        assert len(told) < 1000
        assert "\n" not in told


async def test_what_a_source_says_of_an_image_adds_nothing_to_an_order_for_the_target() -> None:
    lie = '{"virtual-size": 1, "format-specific": {"data": {"compat": "1.1,backing_file=/etc/x"}}}'

    with pytest.raises(ValueError, match=r"option '1\.1,backing_file"):
        images.parse(lie, "640", "qcow2")
    with pytest.raises(ValueError, match="mode '--reference"):
        images.parse('{"virtual-size": 1}', "--reference=/etc/shadow", "raw")


async def test_a_command_to_be_typed_is_quoted_too() -> None:
    with pytest.raises(RemoteError, match=r"run fallocate -l 1 -- '/srv/\$\(reboot\)' on the host"):
        await images.take_room(Liar("", status=1), "/srv/$(reboot)", Bytes(1))
