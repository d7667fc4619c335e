from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, field_validator

from vmckpt.errors import BadInput, PolicyError
from vmckpt.util import config_file
from vmckpt.util.config_file import Problem

PATH = Path("a.yaml")


class Leaf(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    colour: str = "red"


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    size: int = 1
    leaf: Leaf | None = None
    leaves: list[Leaf] = []
    words: dict[str, str] = {}


def wrong(text: str) -> list[str]:
    return [one.at(PATH) for one in config_file.examine(text, Form).problems]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sise: 1", "a.yaml:1: unknown key 'sise'; did you mean 'size'?"),
        (
            "zzz: 1",
            "a.yaml:1: unknown key 'zzz'; known: leaf, leaves, size, words",
        ),
        (
            "size: 1\nleaf:\n  color: x",
            "a.yaml:3: unknown key 'color'; did you mean 'colour'?",
        ),
        (
            "leaves:\n- colour: x\n- {hue: x}",
            "a.yaml:3: unknown key 'hue'; known: colour",
        ),
        ("leaf: red", "a.yaml:1: leaf: must be a mapping, like {a: b}, not 'red'"),
        ("leaves: {}", "a.yaml:1: leaves: must be a list, like [a, b], not {}"),
        ("words: {on: 7}", "a.yaml:1: the key on must be in quotes"),
        ("words: {a: 7}", "a.yaml:1: words.a: must be text; put it in quotes, not 7"),
        ("- 1", "a.yaml:1: the file: must be a mapping, like {a: b}, not [1]"),
        ("", "a.yaml:1: the file: must be a mapping, like {a: b}, not None"),
        ("size: 1\nsize: 2", "a.yaml:2: duplicate key 'size'"),
        ("size: &a 1", "a.yaml:1: aliases (&, *) are not allowed"),
        ("\nsize: !!bool x", "a.yaml:2: tags (!) are not allowed"),
        ("<<: {size: 2}", "a.yaml:1: the key << must be in quotes"),
        ("? [size]\n: 2", "a.yaml:1: a key must be text, not a list or mapping"),
        ("size: 1\n--- \nsize: 2", "a.yaml:2: but found another document"),
        ('"a\\nb": 1', "a.yaml:1: unknown key 'a\\nb'; known: leaf, leaves, size, words"),
        ("[" * 5000, "a.yaml:1: nested too deeply"),
    ],
)
def test_each_mistake_is_one_line_with_file_line_key_and_mend(text: str, told: str) -> None:
    found = wrong(text)

    assert told in found
    assert all("\n" not in one for one in found)


def test_all_mistakes_are_told_in_the_order_of_the_file() -> None:
    text = "words: 1\nsise: 2\nsize: x"

    assert [one.line for one in config_file.examine(text, Form).problems] == [1, 2, 3]
    assert config_file.first(config_file.examine(text, Form).problems, PATH).endswith(
        "(and 2 more)"
    )


class Pair(BaseModel):
    left: str
    right: str

    @field_validator("right")
    @classmethod
    def refuse(cls, _: str) -> str:
        raise ValueError("the other side is missing")


def test_only_keys_that_are_missing_come_last() -> None:
    found = config_file.examine("\nright: x", Pair).problems

    assert [(one.text, one.missing) for one in found] == [
        ("right: the other side is missing", False), ("left is missing", True),
    ]  # fmt: skip


def test_a_date_stays_the_text_that_was_written() -> None:
    value = config_file.examine("words: {built: 2026-13-99}", Form).value

    assert value is not None
    assert value.words == {"built": "2026-13-99"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("+3", 3), ("-7", -7), ("0x1F", 31), ("0", 0)],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: int) -> None:
    found = config_file.examine(f"size: {text}", Form).value

    assert found is not None
    assert found.size == value


@pytest.mark.parametrize("text", ["22:22", "1:03", "1_0", "0b11", "0o17", "0_", "1:30.5"])
def test_what_only_yaml_1_1_takes_for_a_number_is_text(text: str) -> None:
    found = config_file.examine(f"words: {{a: {text}}}", Form).value

    assert found is not None
    assert found.words == {"a": text}
    assert wrong(f"size: {text}") == [
        f"a.yaml:1: size: input should be a valid integer, not {text!r}"
    ]


class Loose(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    share: float


@pytest.mark.parametrize(
    ("text", "value"), [("1e3", 1000.0), (".5", 0.5), ("2", 2.0), ("-1.5", -1.5)]
)
def test_fractions_are_those_of_yaml_1_2(text: str, value: float) -> None:
    found = config_file.examine(f"share: {text}", Loose).value

    assert found is not None
    assert found.share == value


@pytest.mark.parametrize("text", ["1_0.5", "1_0", "1:30.5", "010_0"])
def test_no_number_has_underscores_or_base_60(text: str) -> None:
    assert config_file.examine(f"share: {text}", Loose).value is None


def test_a_key_without_a_value_is_refused_where_it_could_be_taken_for_the_default() -> None:
    text = "size: 1\nleaf:\n  colour:\nwords: ~"

    assert config_file.examine(text, Form, empty_values=False).problems == (
        Problem(3, "colour has no value; add a value, or remove the key"),
        Problem(4, "words has no value; add a value, or remove the key"),
    )


def test_the_lines_of_all_keys_and_list_entries_are_known() -> None:
    lines = config_file.examine("size: 1\nleaves:\n- colour: a\n-\n  colour: b", Form).lines

    assert lines.all() == {
        "size": 1, "leaves": 2, "leaves.0": 3, "leaves.0.colour": 3, "leaves.1": 5,
        "leaves.1.colour": 5,
    }  # fmt: skip
    assert lines.of("leaves", 1, "hue") == 5
    assert lines.of("nowhere") == 1
    assert lines.of("nowhere", "leaves") == 1, "a later key does not belong to this node"
    assert lines.of("leaves", 7, "colour") == 2
    assert lines.of("leaves", "colour", 1, "colour") == 2


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_in_one_line_each(text: str) -> None:
    assert all("\n" not in line for line in wrong(text))


@given(st.text(alphabet="ab:-[]{}&*!?|>'\"#%@`\n <,0.", max_size=60))
def test_any_yaml_is_read_or_refused_in_one_line_each(text: str) -> None:
    assert all("\n" not in line for line in wrong(text))


def test_a_file_is_read_to_its_limit_whatever_its_size_says(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"x" * ((1 << 20) + 1))

    with pytest.raises(PolicyError, match="the file exceeds 1 MiB and is not a valid policy"):
        config_file.read(large, PolicyError, "policy")
    with pytest.raises(PolicyError, match="the file exceeds 1 MiB"), suppress(FileNotFoundError):
        config_file.read(Path("/dev/zero"), PolicyError, "policy")


def test_the_error_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        config_file.read(tmp_path / "none", BadInput, "policy")
