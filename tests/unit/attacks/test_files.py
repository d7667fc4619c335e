"""Files that are no good: each is refused in one line, soon, and whatever they are."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt import inventory, units
from vmckpt.errors import BadInput, InventoryError, PolicyError, VmckptError
from vmckpt.migration import trace
from vmckpt.policy import loader, parse
from vmckpt.util import config_file

PATH = Path("hosts.yaml")
BOMB = "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nhosts: *c\n"
GOOD = 'hosts: {a: {uri: "qemu:///system"}}\n'
POLICY = "version: vmckpt/v1\nname: a\n"


def refused(call: Callable[[], object], limit: float = 10.0) -> str:
    """The one line with which it is refused, and soon."""
    begun = time.process_time()
    with pytest.raises(VmckptError) as caught:
        call()
    assert time.process_time() - begun < limit
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 1000
    return line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "hosts.yaml:1: aliases (&, *) are not allowed"),
        ("hosts: !!python/object/apply:os.system [id]", "1: tags (!) are not allowed"),
        ("hosts: {<<: {a: 1}}", "1: the key << must be in quotes"),
        (GOOD + GOOD, "2: duplicate key 'hosts'"),
        ('hosts: {a: {uri: "qemu:///s\\0"}}', r"1: control characters ('\x00') are not allowed"),
        ('\nhosts: {"\\x1b[2J": {}}', r"2: control characters ('\x1b') are not allowed"),
        ('hosts: {"\\uD800": {}}', r"1: control characters ('\ud800') are not allowed"),
        ("hosts: 1\n\n\x00", r"hosts.yaml:3: control characters ('\x00') are not allowed"),
        ("hosts: 1" + ":1" * 100_000, "1: hosts: must be a mapping, like {a: b}, not '1:1"),
        ("hosts: 1" + ":1" * 100_000 + ".5", "1: hosts: must be a mapping, like {a: b}, not"),
        ("hosts: {a: 0x" + "f" * 5000 + "}", "1: this number has too many digits"),
        ("hosts: 0b_", "1: hosts: must be a mapping, like {a: b}, not '0b_'"),
        ("hosts: 7" + "7" * 39, "1: hosts: must be a mapping, like {a: b}, not 77777"),
        ("- " * 100_000, "nested too deeply"),
        ("{" * 20_000, "nested too deeply"),
        ("hosts: " + "x" * 200_000, "1: hosts: must be a mapping, like {a: b}, not 'xxx"),
        ("x" * 200_000 + ": 1", "wrong"),
        ("\n".join(f"k{i}: 1" for i in range(3000)), "unknown key 'k0'"),
        ('hosts: {"": {uri: "qemu:///s"}}', "is not a valid host name"),
        ('hosts: {"a\\nb": {uri: "qemu:///s"}}', "is not a valid host name"),
        ('hosts: {a: {uri: "qemu+tls://[::1"}}', "is not a libvirt URI: Invalid IPv6 URL"),
        ('hosts: {a: {uri: "qemu+tls://a:123456/"}}', "is not a libvirt URI: Port out of range"),
        ('hosts: {a: {uri: "q:///", ssh: {address: a, key_file: ~nobody.here/k}}}',
         "~nobody.here/k': unknown user; write an absolute path"),
        ("hosts: [" + "1e999, " * 1000 + "]", "hosts: must be a mapping, like {a: b}"),
    ],
)  # fmt: skip
def test_a_hostile_inventory_is_one_line(text: str, told: str) -> None:
    line = refused(lambda: inventory.parse(text, PATH))

    assert told in line or told == "wrong"


def test_more_values_than_any_inventory_has_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "_MOST_NODES", 1000)

    assert "1000: more than 1000 values are not allowed" in refused(
        lambda: inventory.parse("- 1\n" * 200_000, PATH)
    )


def test_a_key_that_looks_like_a_mark_of_ours_is_told() -> None:
    assert "hosts.yaml:1: unknown key '(word)'; known:" in refused(
        lambda: inventory.parse("(word): 1\nhosts: {a: {uri: 'q:///'}}", PATH)
    )


@pytest.mark.parametrize(
    "text",
    [
        "limits: {time: '1" + " " * 200_000 + "!'}",
        "limits: {bandwidth: '" + "9" * 200_000 + "'}",
        "limits: {time: 1:30:20.5}",
        "retries: {factor: .nan}",
        "retries: {factor: .inf}",
        "retries: {factor: 99999999999999999999999999999999}",
        "converge: {stall: {margin: 99999999999999999999999999999999999999}}",
        "select: {memory: {at_least: 0x" + "f" * 30 + "}}",
        "description: '" + "x" * 200_000 + "'",
        "converge: {rules: [" + "{do: " * 2000 + "]}",
        "converge: {rules: [" + "{}, " * 2000 + "]}",
    ],
)
def test_a_hostile_policy_is_one_line(text: str) -> None:
    refused(lambda: parse.parse(POLICY + text, PATH))
    _, problems = parse.examine(POLICY + text, PATH)

    assert all("\n" not in one.at(PATH) and len(one.at(PATH)) < 1000 for one in problems)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())

    assert list(inventory.load(path).hosts) == ["a"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_another_encoding_is_one_line(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_bytes(("# ä\n" + GOOD).encode(encoding))

    assert "not UTF-8" in refused(lambda: inventory.load(path))


def test_no_zero_byte_gets_in_by_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_bytes(GOOD.encode("utf-16-le"))

    assert "hosts.yaml:1: control characters" in refused(lambda: inventory.load(path))


READERS: list[Callable[[Path], object]] = [inventory.load, loader.load_file, trace.read]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/dev/zero", "the file exceeds"), ("/proc/self/mem", ""), ("/dev/null", ""),
        ("/", "directory"), ("/nowhere/at/all", "No such file"), ("a\0b", "not a valid file name"),
        ("x" * 300, "File name too long"),
    ],
)  # fmt: skip
def test_what_is_no_file_is_one_line(read: Callable[[Path], object], path: str, told: str) -> None:
    assert told in refused(lambda: read(Path(path)))


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_that_brings_nothing_is_not_waited_for(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_file, "_PIPE_LIMIT", 0.2)
    pipe = tmp_path / "p.yaml"
    os.mkfifo(pipe)

    assert "no end of file within 0.2 s" in refused(lambda: read(pipe))


def test_a_pipe_that_drips_is_not_waited_for_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "_PIPE_LIMIT", 0.3)
    here, there = os.pipe()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.02):
            os.write(there, b"#")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert "no end of file within" in refused(lambda: inventory.load(Path(f"/dev/fd/{here}")))
    finally:
        ended.set()
        dripping.join()
        os.close(here)
        os.close(there)


def test_a_shells_pipe_can_be_read() -> None:
    here, there = os.pipe()
    os.write(there, GOOD.encode())
    os.close(there)
    try:
        assert list(inventory.load(Path(f"/dev/fd/{here}")).hosts) == ["a"]
    finally:
        os.close(here)


def test_a_folder_called_like_a_policy_is_told_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").mkdir()

    with pytest.raises(PolicyError, match=r"x\.yaml: Is a directory"):
        loader.load_all(tmp_path)


def test_an_unknown_host_among_thousands_is_one_line() -> None:
    text = "hosts:\n" + "".join(f"  zz{i}: {{uri: 'qemu:///s'}}\n" for i in range(3000))
    known = inventory.parse(text, PATH)

    with pytest.raises(InventoryError, match="and 2970 more"):
        known.host("a")


@pytest.mark.parametrize("text", ["1" + " " * 1_000_000 + "!", "9" * 1_000_000, "1" + "k" * 10**6])
@pytest.mark.parametrize("read", [units.parse_bytes, units.parse_seconds, units.parse_rate])
def test_a_long_text_is_no_size_time_or_rate(read: Callable[[str], object], text: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match="is invalid; use a value like") as caught:
        read(text)
    assert len(str(caught.value)) < 200
    assert time.process_time() - begun < 0.5


def test_what_never_ends_can_be_shown() -> None:
    assert units.show_seconds(float("inf")) == "forever"
    assert units.show_seconds(float("nan")) == "unknown"
    assert units.show_bytes(float("inf")) == "unlimited"


@settings(max_examples=60)
@given(st.text(max_size=80), st.sampled_from(["hosts: {a: {uri: %s}}", "hosts: {%s: 1}", "%s"]))
def test_any_value_is_taken_or_refused_in_one_line(text: str, form: str) -> None:
    for written in (text, "'" + text.replace("'", "''") + "'"):
        told = ""
        try:
            inventory.parse(form.replace("%s", written), PATH)
        except BadInput as exc:
            told = str(exc)
        assert "\n" not in told
