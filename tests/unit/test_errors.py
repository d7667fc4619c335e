"""Errors are one line with what to do, and end a command with the exit code that is documented."""

import re

import pytest

from vmckpt import errors
from vmckpt.errors import (
    BadInput,
    Cancelled,
    HypervisorError,
    OutcomeUnknown,
    VmckptError,
    at_host,
    meant,
    run_doctor,
    silent_hosts,
    some,
)

TREE = re.findall(r"^( {4}[ |+-]*)(\w+) +(\d+) ", errors.__doc__ or "", re.MULTILINE)
"""Indent, name and exit code, as the module documents them."""
KINDS = [
    one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, VmckptError)
]


@pytest.mark.parametrize(("name", "code"), [(name, int(code)) for _, name, code in TREE])
def test_an_exit_code_is_the_documented_one(name: str, code: int) -> None:
    assert getattr(errors, name).exit_code == code


def test_a_kind_is_below_the_one_that_it_is_documented_under() -> None:
    above: dict[int, type] = {}
    for indent, name, _ in TREE:
        kind, depth = getattr(errors, name), len(indent)
        parents = [one for place, one in above.items() if place < depth]
        assert all(issubclass(kind, parent) for parent in parents), name
        above = {place: one for place, one in above.items() if place < depth} | {depth: kind}
    assert len(TREE) > 30


def test_every_kind_is_documented() -> None:
    assert {kind.__name__ for kind in KINDS} == {name for _, name, _ in TREE}


def test_only_kinds_of_one_kind_share_an_exit_code() -> None:
    own = [kind for kind in KINDS if "exit_code" in vars(kind)]
    for kind in own:
        for other in own:
            if kind.exit_code == other.exit_code != 1:
                assert issubclass(kind, other) or issubclass(other, kind), (kind, other)


def test_an_error_says_what_to_do_last() -> None:
    assert str(BadInput("it is wrong", hint="mend it")) == "it is wrong; mend it"
    assert str(BadInput("it is wrong")) == "it is wrong"
    error = OutcomeUnknown("alpha: no answer", host="alpha", code=38, hint="look")
    assert (error.host, error.code, error.message) == ("alpha", 38, "alpha: no answer")
    assert isinstance(error, HypervisorError)


def test_all_was_put_back_unless_that_is_said_of_one_error() -> None:
    one, other = Cancelled("x"), Cancelled("y")
    one.undone = False
    assert (one.undone, other.undone) == (False, True)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("web1", "did you mean web2?"), ("db", "see vmckpt list"),
        ("alpah", "did you mean alpha or alpha2?"),
    ],
)  # fmt: skip
def test_a_misspelt_name_brings_those_that_are_nearly_it(word: str, hint: str) -> None:
    assert meant(word, iter(["web2", "alpha", "alpha2"]), "see vmckpt list") == hint


def test_a_host_is_named_once() -> None:
    assert at_host("alpha", "no answer") == "alpha: no answer"
    assert at_host("alpha", "alpha: no answer") == "alpha: no answer"
    assert at_host("alpha", "alphabet: no") == "alpha: alphabet: no"


def test_many_names_are_shortened() -> None:
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some((f"h{number}" for number in range(200)), 2) == "h0, h1 and 198 more"


def test_a_hint_examines_a_few_hosts() -> None:
    assert run_doctor(["a", "b c"]) == "run vmckpt doctor a 'b c'"
    assert run_doctor(f"h{number}" for number in range(200)) == "run vmckpt doctor h0 h1 h2"


def test_many_silent_hosts_are_one_short_line() -> None:
    away = {f"h{number}": "no route" for number in range(200)}
    assert silent_hosts(away) == "h0, h1, h2 and 197 more; h0: no route"
    assert silent_hosts({"a": "no route", "b": "b: refused"}) == "a: no route; b: refused"
